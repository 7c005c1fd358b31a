"""Small runs whose figures are worked out by hand, and what must hold for every run. FIELD_CASES J02 and J05."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_bench.load.records import Outcome, RequestRecord, ServerTimings
from pdserve_bench.measures.breakdown import by_class
from pdserve_bench.measures.summarise import is_good, itl_p99_s, num_itl_per_event, summarise, summary_to_json
from pdserve_bench.measures.summary import Distribution, Slo
from tests.bench.measures.making import record, run_of

SLO = Slo(ttft_s=1.0, itl_s=0.25)


def test_latencies_count_from_the_scheduled_time() -> None:
    late = record(scheduled_s=1.0, sent_s=1.5, events=[(2.0, 1), (2.5, 1), (3.5, 1)])
    summary = summarise(run_of([late]), SLO)
    assert summary.ttft.median == 1.0
    assert summary.ttft_from_send.median == 0.5
    assert summary.e2e.median == 2.5
    assert summary.tpot.median == 0.75
    assert (summary.itl.count, summary.itl.min, summary.itl.max) == (2, 0.5, 1.0)


def test_every_throughput_is_of_what_came_within_the_run() -> None:
    over_the_end = record(0, Outcome.UNFINISHED, [(9.0, 2), (11.0, 3)], num_prompt_tokens=70)
    too_late = record(1, Outcome.UNFINISHED, [(10.5, 1)], num_prompt_tokens=1000)
    broken = record(2, Outcome.FAILED, [(1.0, 4)], num_prompt_tokens=30)
    done = record(3, events=[(1.0, 1), (10.0, 1)], num_prompt_tokens=100)
    refused = record(4, Outcome.REJECTED, num_prompt_tokens=1000)
    summary = summarise(run_of([over_the_end, too_late, broken, done, refused]), SLO)
    assert summary.output_throughput == (2 + 4 + 2) / 10
    assert summary.prompt_throughput == (70 + 30 + 100) / 10
    assert summary.request_throughput == 0.1


def test_usage_counts_where_events_do_not_say_how_many_tokens_they_carry() -> None:
    bundled = record(events=[(1.0, 1), (2.0, 1), (3.0, 1), (11.0, 1)], num_output_tokens=12, counts_are_exact=False)
    assert summarise(run_of([bundled]), SLO).output_throughput == 9 / 10
    assert num_itl_per_event([bundled]) == 1
    assert summarise(run_of([bundled]), SLO).num_count_mismatches == 0


@pytest.mark.parametrize(
    ("one", "good"),
    [
        (record(events=[(1.0, 1), (1.25, 1)]), True),
        (record(events=[(1.01, 1), (1.25, 1)]), False),
        (record(events=[(1.0, 1), (1.26, 1)]), False),
        (record(events=[(1.0, 1)]), True),
        (record(events=[]), False),
        (record(events=[(0.1, 1)], outcome=Outcome.FAILED), False),
        (record(events=[(0.1, 1)], outcome=Outcome.UNFINISHED), False),
        (record(events=[], outcome=Outcome.REJECTED), False),
        (record(events=[(1.0, 1), (1.25, 1)], outcome=Outcome.CANCELLED), True),
        (record(events=[(1.0, 1), (1.26, 1)], outcome=Outcome.CANCELLED), False),
        (record(events=[], outcome=Outcome.CANCELLED), False),
    ],
)
def test_good_is_what_met_both_bounds_until_it_ended_as_it_should(one: RequestRecord, good: bool) -> None:
    assert is_good(one, SLO) is good
    assert not is_good(one, SLO, wrong={one.number})


def test_one_stall_in_a_stream_is_not_hidden_by_its_mean() -> None:
    stalled = record(events=[(at * 0.125, 1) for at in range(1, 31)] + [(30 * 0.125 + 5.0, 1)])
    assert stalled.tpot_s is not None
    assert stalled.tpot_s < 0.3
    assert itl_p99_s(stalled) == pytest.approx(np.percentile([0.125] * 29 + [5.0], 99))
    assert not is_good(stalled, Slo(ttft_s=1.0, itl_s=0.3))


def test_queue_and_cached_share_are_of_those_that_the_server_told_of() -> None:
    timings = ServerTimings(queue_s=0.5, reserve_s=0.0, prefill_s=0.1, exposed_transfer_s=0.0, decode_s=0.1, ttft_s=0.6)
    told = record(0, events=[(0.1, 1)], num_prompt_tokens=100, num_cached_tokens=64, server=timings)
    silent = record(1, events=[(0.1, 1)], num_prompt_tokens=1000)
    summary = summarise(run_of([told, silent]), SLO)
    assert (summary.queue.count, summary.queue.median) == (1, 0.5)
    assert summary.cached_share == 0.64
    assert summarise(run_of([silent]), SLO).cached_share is None


def test_wrong_outputs_are_counted_and_not_good() -> None:
    records = [record(number, events=[(0.1, 1)]) for number in range(4)]
    summary = summarise(run_of(records), SLO, wrong=[1, 3, 99])
    assert (summary.num_wrong, summary.num_good, summary.goodput) == (2, 2, 0.5)


@pytest.mark.parametrize("duration_s", [0.0, 10.0])
def test_a_run_without_requests_has_counts_and_no_figures(duration_s: float) -> None:
    summary = summarise(run_of([], duration_s), SLO)
    assert summary.offered == 0
    assert summary.goodput == summary.output_throughput == 0.0
    assert summary.ttft == Distribution(0, None, None, None, None, {})
    json.dumps(summary_to_json(summary), allow_nan=False)


def test_json_names_percentiles() -> None:
    document = summary_to_json(summarise(run_of([record(events=[(0.5, 1), (0.75, 1)])]), SLO))
    assert document["ttft"] == {
        "count": 1, "mean": 0.5, "std": 0.0, "min": 0.5, "max": 0.5, "p50": 0.5, "p90": 0.5, "p95": 0.5, "p99": 0.5
    }  # fmt: skip
    assert document["completed"] == 1
    assert json.loads(json.dumps(document, allow_nan=False)) == document


@pytest.mark.parametrize(("usage", "mismatches"), [(64, 0), (63, 1)])
def test_j02_tokens_in_chunks_of_one_to_eight(usage: int, mismatches: int) -> None:
    sizes = [1, 2, 3, 4, 5, 6, 7, 8, 8, 7, 6, 4, 2, 1]
    assert sum(sizes) == 64
    events = [(1.0 + 0.125 * at, size) for at, size in enumerate(sizes)]
    summary = summarise(run_of([record(events=events, num_output_tokens=usage)]), SLO)
    assert summary.itl.count == 63
    assert summary.tpot.median == 13 * 0.125 / (usage - 1)
    assert summary.output_throughput == usage / 10
    assert summary.num_count_mismatches == mismatches
    assert summary.itl.mean == pytest.approx(13 * 0.125 / 63)


def test_j05_failures_stand_beside_the_latencies_of_the_rest() -> None:
    good = [record(number, events=[(0.5, 1), (0.75, 1)]) for number in range(80)]
    broken = [record(80 + number, Outcome.FAILED, [(5.0, 3)], error="reset") for number in range(10)]
    empty = [record(90 + number, Outcome.FAILED, error="no tokens") for number in range(5)]
    left_over = [record(95 + number, Outcome.UNFINISHED, [(9.0, 1), (9.5, 1)]) for number in range(5)]
    summary = summarise(run_of([*good, *broken, *empty, *left_over]), SLO)
    assert (summary.completed, summary.failed, summary.unfinished, summary.offered) == (80, 15, 5, 100)
    assert (summary.ttft.count, summary.ttft.max) == (80, 0.5)
    assert (summary.itl.count, summary.itl.max) == (80, 0.25)
    assert (summary.tpot.count, summary.e2e.count, summary.ttft_from_send.count) == (80, 80, 80)
    assert summary.output_throughput == (80 * 2 + 10 * 3 + 5 * 2) / 10
    assert summary.goodput == 0.8


_TIMES = st.floats(min_value=0.0, max_value=20.0, allow_nan=False)


@st.composite
def _records(draw: st.DrawFn) -> list[RequestRecord]:
    return [draw(_record(number)) for number in range(draw(st.integers(0, 12)))]


@st.composite
def _record(draw: st.DrawFn, number: int) -> RequestRecord:
    outcome = draw(st.sampled_from(Outcome))
    times = sorted(draw(st.lists(_TIMES, min_size=outcome is Outcome.COMPLETED, max_size=6)))
    events = [] if outcome is Outcome.REJECTED else [(at_s, draw(st.integers(1, 8))) for at_s in times]
    scheduled_s = draw(st.floats(0.0, events[0][0])) if events else draw(_TIMES)
    return record(
        number,
        outcome,
        events,
        scheduled_s=scheduled_s,
        sent_s=scheduled_s,
        request_class=draw(st.sampled_from(["chat", "rag", "batch"])),
    )


@settings(deadline=None)
@given(records=_records(), wrong=st.sets(st.integers(0, 12)))
def test_counts_add_up_and_figures_keep_their_bounds(records: list[RequestRecord], wrong: set[int]) -> None:
    one = summarise(run_of(records), SLO, wrong=wrong)
    ended = one.completed + one.failed + one.rejected + one.cancelled + one.unfinished
    assert ended == one.offered == len(records)
    assert one.num_good <= one.completed + one.cancelled
    assert 0.0 <= one.goodput <= 1.0
    for distribution in (one.ttft, one.ttft_from_send, one.itl, one.tpot, one.e2e):
        _assert_in_order(distribution)
    json.dumps(summary_to_json(one), allow_nan=False)


def _assert_in_order(distribution: Distribution) -> None:
    if distribution.count == 0:
        return
    found = [distribution.min, *distribution.percentiles.values(), distribution.max]
    for lower, higher in pairwise(found):
        assert lower is not None
        assert higher is not None
        assert lower <= higher + 1e-12  # interpolation rounds


@settings(deadline=None)
@given(records=_records())
def test_gaps_add_up_to_the_stream(records: list[RequestRecord]) -> None:
    for one in records:
        if not one.events:
            continue
        stream_s = one.events[-1].at_s - one.events[0].at_s
        assert sum(one.itls_s) == pytest.approx(stream_s, abs=1e-9)
        assert len(one.itls_s) == one.num_output_tokens - 1
        if one.num_output_tokens > 1:
            assert one.tpot_s is not None
            assert one.tpot_s * (one.num_output_tokens - 1) == pytest.approx(stream_s, abs=1e-9)


@settings(deadline=None)
@given(records=_records(), wrong=st.sets(st.integers(0, 12)))
def test_classes_add_up_to_the_run(records: list[RequestRecord], wrong: set[int]) -> None:
    run = run_of(records)
    whole, parts = summarise(run, SLO, wrong=wrong), list(by_class(run, SLO, wrong).values())
    for name in ("offered", "completed", "failed", "rejected", "cancelled", "unfinished", "num_good", "num_wrong"):
        assert sum(getattr(part, name) for part in parts) == getattr(whole, name)
    for name in ("request_throughput", "prompt_throughput", "output_throughput"):
        assert sum(getattr(part, name) for part in parts) == pytest.approx(getattr(whole, name))
    assert sum(part.itl.count for part in parts) == whole.itl.count
