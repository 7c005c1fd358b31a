"""What changed between runs made up by formula, and what was the limit of one."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_bench.compare.attribution import Finding, causes, compare_phases, time_shares
from pdserve_bench.compare.limiting import Resource, limiting_resource
from pdserve_bench.compare.phase_changes import Quantity
from pdserve_bench.compare.phases import Phase
from pdserve_bench.compare.samples import late_mean, series
from pdserve_bench.load.records import Outcome, RunResult, ServerSample
from tests.support.phase_runs import IDLE_CLIENT, Shape, as_run, record, run_of

BASE = Shape()
BASELINE = [run_of(BASE, seed) for seed in (1, 2)]


def changed(**fields: float) -> list[Finding]:
    return compare_phases(BASELINE, [run_of(replace(BASE, **fields), 3)])


@settings(max_examples=20, deadline=None)
@given(st.integers(10, 10_000))
def test_nothing_is_named_where_nothing_changed(seed: int) -> None:
    assert compare_phases(BASELINE, [run_of(BASE, seed)]) == []


@pytest.mark.parametrize(
    ("fields", "quantity", "phase", "kind"),
    [
        ({"prefill_fixed_s": 0.070}, Quantity.PREFILL_FIXED, Phase.PREFILL, "fixed cost per prefill grew by 50"),
        ({"prefill_token_s": 0.001}, Quantity.PREFILL_TOKEN, Phase.PREFILL, "prompt token doubled"),
        ({"transfer_s": 0.021}, Quantity.TRANSFER, Phase.TRANSFER, "exposed transfer doubled"),
        ({"decode_token_s": 0.060}, Quantity.DECODE_TOKEN, Phase.DECODE, "per-token decode rate halved"),
        ({"decode_token_s": 0.015}, Quantity.DECODE_TOKEN, Phase.DECODE, "per-token decode rate doubled"),
        ({"streaming_s": 0.050}, Quantity.STREAMING, Phase.STREAMING, "streaming to the client grew by 48"),
        ({"queue_s": 0.300}, Quantity.QUEUE, Phase.QUEUE, "grew by"),
        ({"reserve_s": 0.300}, Quantity.RESERVE, Phase.RESERVE, "grew by"),
    ],
)
def test_one_change_is_named_alone(fields: dict[str, float], quantity: Quantity, phase: Phase, kind: str) -> None:
    (finding,) = changed(**fields)
    assert (finding.quantity, finding.phase, finding.follows_from) == (quantity, phase, None)
    assert kind in finding.kind
    assert "ms" in finding.sentence
    assert "noise" in finding.sentence


def test_two_causes_are_both_named() -> None:
    found = changed(prefill_fixed_s=0.070, transfer_s=0.040)
    assert {finding.quantity for finding in causes(found)} == {Quantity.PREFILL_FIXED, Quantity.TRANSFER}


def test_waits_follow_from_what_they_wait_for() -> None:
    found = changed(decode_token_s=0.060, queue_s=0.500, reserve_s=0.200)
    assert [finding.phase for finding in causes(found)] == [Phase.DECODE]
    assert {finding.phase: finding.follows_from for finding in found[1:]} == {
        Phase.QUEUE: Phase.DECODE,
        Phase.RESERVE: Phase.DECODE,
    }


def test_joining_a_slower_batch_is_not_a_slower_transfer() -> None:
    joined = changed(decode_token_s=0.060, transfer_s=0.025)
    assert [finding.phase for finding in causes(joined)] == [Phase.DECODE]
    slow_link = changed(decode_token_s=0.060, transfer_s=0.150)
    assert {finding.phase for finding in causes(slow_link)} == {Phase.DECODE, Phase.TRANSFER}


def test_a_wait_that_shrank_does_not_follow_from_a_phase_that_grew() -> None:
    slow_queue = [run_of(replace(BASE, queue_s=0.5), seed) for seed in (1, 2)]
    found = compare_phases(slow_queue, [run_of(replace(BASE, decode_token_s=0.060), 3)])
    assert {finding.phase for finding in causes(found)} == {Phase.DECODE, Phase.QUEUE}


def test_the_baselines_own_repeats_make_the_noise() -> None:
    """The same change is named against calm repeats, and not against repeats, or a control, that differ as much."""
    wild = run_of(replace(BASE, decode_token_s=0.045), 2)
    subject = [run_of(replace(BASE, decode_token_s=0.045), 3)]
    assert compare_phases(BASELINE, subject)
    assert compare_phases([BASELINE[0], wild], subject) == []
    assert compare_phases(BASELINE, subject, control=[wild]) == []


def test_prompts_of_one_length_are_compared_whole() -> None:
    def alike(fixed_s: float) -> RunResult:
        shape = replace(BASE, prefill_fixed_s=fixed_s)
        return as_run([record(shape, number, num_prompt_tokens=200) for number in range(20)])

    (finding,) = compare_phases([alike(0.020)], [alike(0.070)])
    assert finding.quantity is Quantity.PREFILL_TIME
    assert finding.amount_s == pytest.approx(0.050)


def test_a_side_without_timings_is_an_error() -> None:
    blind = as_run([replace(record(BASE, number), server=None) for number in range(9)])
    with pytest.raises(ValueError, match="subject"):
        compare_phases(BASELINE, [blind])


def test_shares_of_time_add_up() -> None:
    shares = time_shares(run_of(replace(BASE, jitter_s=0.0)))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert max(shares, key=lambda phase: shares[phase]) is Phase.DECODE
    assert time_shares(as_run([])) == {}


def test_shares_of_several_runs_are_those_of_each_together() -> None:
    """Their requests have the same numbers and the same hours, but none waited for one of another run."""
    idle, busy = run_of(replace(BASE, prefill_fixed_s=0.001), 1), run_of(replace(BASE, prefill_fixed_s=0.300), 2)
    alike = time_shares(idle, idle)
    assert alike == pytest.approx(time_shares(idle))
    both, apart = time_shares(idle, busy), [time_shares(idle), time_shares(busy)]
    assert all(min(one[phase] for one in apart) <= both[phase] <= max(one[phase] for one in apart) for phase in Phase)


# --- the limiting resource --------------------------------------------------------------------------------------------


def loaded(
    phase: str, cpu_s: Mapping[str, float], values: Mapping[str, float] | None = None, num_unfinished: int = 15
) -> RunResult:
    """60 requests a second apart, whose wait of one kind grows by 0.2 s with each; some are left over."""
    records = [record(replace(BASE, **{phase: 0.2 * number}), number) for number in range(60)]
    left = [
        replace(record(BASE, 60 + number), outcome=Outcome.UNFINISHED, events=(), server=None)
        for number in range(num_unfinished)
    ]
    samples = tuple(ServerSample(float(at_s), values or {}) for at_s in range(75))
    return replace(as_run(records + left), duration_s=100.0, server_cpu_s=cpu_s, samples=samples)


def metric(name: str, role: str, value: float) -> dict[str, float]:
    return {f'pdserve:{name}{{model="m",role="{role}",worker="{role}-0"}}': value}


BUSY = {"prefill-0": 98.0, "decode-0": 97.0, "coordinator": 20.0}
KV_FULL = metric("kv_blocks_reserved", "decode", 96.0) | metric("kv_blocks_usable", "decode", 100.0)


def test_no_resource_limits_a_load_that_is_met() -> None:
    assert limiting_resource(replace(run_of(BASE), server_cpu_s=BUSY)).resource is Resource.NONE


@pytest.mark.parametrize(
    ("run", "resource"),
    [
        (loaded("prefill_fixed_s", {**BUSY, "decode-0": 50.0}), Resource.PREFILL_POOL),
        (loaded("prefill_fixed_s", BUSY, metric("worker_requests_waiting", "prefill", 9.0)), Resource.PREFILL_POOL),
        (loaded("reserve_s", {**BUSY, "prefill-0": 30.0}), Resource.DECODE_POOL),
        (loaded("reserve_s", BUSY, metric("worker_requests_waiting", "decode", 9.0)), Resource.DECODE_POOL),
        (loaded("queue_s", BUSY, KV_FULL), Resource.KV_BLOCKS),
        (loaded("queue_s", {**BUSY, "coordinator": 95.0}), Resource.COORDINATOR),
        (loaded("queue_s", {"colocated-0": 99.0, "coordinator": 9.0}), Resource.COLOCATED_POOL),
        (loaded("queue_s", {"m.decode-0": 99.0, "m.prefill-0": 9.0}), Resource.DECODE_POOL),
        (loaded("queue_s", {}), Resource.UNKNOWN),
    ],
)
def test_the_limit_of_an_unmet_load(run: RunResult, resource: Resource) -> None:
    assert limiting_resource(run).resource is resource


def test_two_cores_half_used_are_not_busy() -> None:
    run = loaded("queue_s", {"colocated-0": 100.0})
    assert limiting_resource(run).resource is Resource.COLOCATED_POOL
    assert limiting_resource(run, {"colocated-0": 2.0}).resource is Resource.UNKNOWN


@pytest.mark.parametrize("limits", [{"cores": 0.97}, {"dispatch_lag_p99_s": 0.4}, {"loop_lag_p99_s": 0.4}])
def test_a_client_that_was_late_is_the_limit_before_all_else(limits: dict[str, float]) -> None:
    run = replace(loaded("prefill_fixed_s", BUSY), limits=replace(IDLE_CLIENT, **limits))
    assert limiting_resource(run).resource is Resource.CLIENT


def test_series_are_read_by_name_and_labels_and_gaps_are_left_out() -> None:
    values = metric("kv_blocks_free", "decode", 3.0) | metric("kv_blocks_free", "prefill", 4.0) | {"plain": 1.0}
    samples = (ServerSample(0.0, values), ServerSample(1.0, {}), ServerSample(2.0, values))
    run = replace(as_run([]), samples=samples, duration_s=2.0)
    assert series(run, "pdserve:kv_blocks_free") == [(0.0, 7.0), (2.0, 7.0)]
    assert series(run, "pdserve:kv_blocks_free", role="decode") == [(0.0, 3.0), (2.0, 3.0)]
    assert series(run, "plain") == [(0.0, 1.0), (2.0, 1.0)]
    assert series(run, "pdserve:kv_blocks") == []
    assert late_mean(run, "nothing") is None
