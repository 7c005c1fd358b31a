"""Each request's time, split into phases that add up; robust figures of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_bench.compare.estimates import quantile, theil_sen
from pdserve_bench.compare.phases import Phase, phase_figures, phase_times
from pdserve_bench.load.records import Outcome
from tests.support.phase_runs import Shape, moved, record, run_of

SHAPE = Shape(jitter_s=0.0)
seconds = st.floats(0.0, 5.0)


def test_every_phase_has_what_the_server_and_the_client_say() -> None:
    (times,) = phase_times([record(SHAPE, 0, num_prompt_tokens=100)])
    expected = {
        Phase.QUEUE: 0.001,
        Phase.RESERVE: 0.002,
        Phase.PREFILL_WAIT: 0.0,
        Phase.PREFILL: 0.070,
        Phase.TRANSFER: 0.010,
        Phase.DECODE: 0.300,
        Phase.STREAMING: 0.002,
    }
    assert times.seconds == pytest.approx(expected)
    assert times.decode_per_token_s == pytest.approx(0.030)


@given(st.lists(st.tuples(seconds, seconds, seconds, seconds, st.floats(0.0, 3.0)), min_size=1, max_size=12))
def test_phases_add_up_to_e2e_and_none_is_negative(rows: list[tuple[float, ...]]) -> None:
    records = []
    for number, (queue_s, reserve_s, prefill_s, decode_token_s, gap_s) in enumerate(rows):
        shape = replace(SHAPE, queue_s=queue_s, reserve_s=reserve_s, decode_token_s=decode_token_s, gap_s=gap_s)
        records.append(record(replace(shape, prefill_fixed_s=prefill_s, prefill_token_s=0.0), number))
    for one, times in zip(records, phase_times(records), strict=True):
        assert min(times.seconds.values()) >= -1e-9
        assert times.e2e_s == pytest.approx(one.events[-1].at_s - (one.sent_s or 0.0))


def test_waiting_for_the_prefill_worker_is_told_apart_from_the_prefill() -> None:
    """Three prompts of 70 ms each come at once: they wait 0, 70 and 140 ms."""
    one = record(replace(SHAPE, queue_s=0.0, reserve_s=0.0), 0, num_prompt_tokens=100)
    records = [moved(one, n, 0.0, prefill_s=0.070 * (n + 1), ttft_s=0.070 * (n + 1)) for n in range(3)]
    times = phase_times(records)
    assert [one.seconds[Phase.PREFILL_WAIT] for one in times] == pytest.approx([0.0, 0.070, 0.140])
    assert [one.seconds[Phase.PREFILL] for one in times] == pytest.approx([0.070] * 3)


def test_a_second_prefill_worker_makes_nobody_wait() -> None:
    one = record(SHAPE, 0)
    times = phase_times([one, moved(one, 1, 0.0, prefill_worker="prefill-1")])
    assert [one.seconds[Phase.PREFILL_WAIT] for one in times] == [0.0, 0.0]


def test_prompts_of_one_step_share_its_time_and_tell_nothing_of_one_prefill() -> None:
    one = record(SHAPE, 0)
    assert [times.alone for times in phase_times([one, moved(one, 1, 0.0), moved(one, 2, 5.0)])] == [False, False, True]


def test_only_completed_requests_with_timings_count() -> None:
    good = record(SHAPE, 0)
    others = [replace(good, number=n, outcome=outcome) for n, outcome in enumerate(Outcome, 1) if n > 1]
    assert [times.number for times in phase_times([good, *others, replace(good, number=9, server=None)])] == [0]


def test_cached_tokens_are_not_prefilled() -> None:
    (times,) = phase_times([replace(record(SHAPE, 0, num_prompt_tokens=100), num_cached_tokens=64)])
    assert times.num_computed_tokens == 36


def test_one_output_token_has_no_time_per_token() -> None:
    (times,) = phase_times([record(replace(SHAPE, num_output_tokens=1, transfer_s=0.0), 0)])
    assert times.decode_per_token_s is None


def test_figures_of_a_run() -> None:
    figures = phase_figures(phase_times(run_of(SHAPE).records))
    assert figures.count == 60
    assert figures.prefill is not None
    assert figures.prefill.fixed.value == pytest.approx(0.020, abs=1e-6)
    assert figures.prefill.slope.value == pytest.approx(0.0005, abs=1e-8)
    assert figures.decode_per_token is not None
    assert figures.decode_per_token.value == pytest.approx(0.030)
    assert figures.p90[Phase.TRANSFER].value == pytest.approx(0.010)


def test_figures_of_nothing() -> None:
    figures = phase_figures([])
    assert (figures.count, figures.median, figures.prefill, figures.decode_per_token) == (0, {}, None, None)


def test_a_quarter_of_wild_points_does_not_move_the_line() -> None:
    xs = [float(x) for x in range(10, 410, 10)]
    ys = [0.02 + 0.0005 * x + (3.0 if n % 5 == 0 else 0.0) for n, x in enumerate(xs)]
    fit = theil_sen(xs, ys)
    assert fit is not None
    assert fit.slope.value == pytest.approx(0.0005, rel=0.1)
    assert fit.fixed.value == pytest.approx(0.02, abs=0.01)
    assert fit.slope.low <= 0.0005 <= fit.slope.high


def test_prompts_of_one_length_give_no_line() -> None:
    assert theil_sen([100.0 + n for n in range(20)], [0.1] * 20) is None
    assert theil_sen([1.0, 100.0], [0.1, 0.2]) is None


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60), st.sampled_from([0.5, 0.9]))
def test_a_quantile_lies_in_its_interval(samples: list[float], share: float) -> None:
    estimate = quantile(samples, share)
    assert estimate is not None
    assert min(samples) <= estimate.low <= estimate.value + 1e-9
    assert estimate.value - 1e-9 <= estimate.high <= max(samples)
