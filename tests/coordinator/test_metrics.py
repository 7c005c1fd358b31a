import asyncio

import pytest
from prometheus_client import generate_latest

from coordinator.generation.generator import GenerationRecord
from coordinator.metrics import Metrics
from coordinator.sequences import SequencePhase, SequenceTimings
from pdserve.core.errors import PdserveError
from pdserve.v1 import fleet_pb2
from tests.support.scheduling_rig import Rig, read_all, scheduling_rig
from tests.support.scripted_worker import MODEL


def value(rig: Rig, name: str, **labels: str) -> float | None:
    return rig.scheduling.metrics.registry.get_sample_value(f"pdserve:{name}", {"model": MODEL.name, **labels})


async def test_gauges_are_at_rest_after_everything_was_cancelled() -> None:
    """H01: the idle coordinator's next scrape shows nothing running, and takes new work."""
    async with scheduling_rig() as rig:
        await rig.add("p0", "prefill")
        decode = await rig.add("d0", "decode", 100)
        decode.script.decode.clear()
        streams = [rig.submit((5, 6), 6) for _ in range(50)]  # two blocks each
        streams += [rig.submit((6, 7), 6) for _ in range(20)]
        await rig.until(lambda: rig.dispatcher.num_in_phase(MODEL.name, SequencePhase.DECODE) == 50)
        assert value(rig, "num_requests_running") == 50
        assert value(rig, "num_requests_waiting") == 20
        await rig.until(lambda: value(rig, "worker_in_flight", role="decode", worker="d0") == 50)
        for stream in streams:
            stream.cancel()
        assert value(rig, "num_requests_waiting") == 0
        assert value(rig, "num_requests_running") == 0
        await rig.until_idle()
        assert value(rig, "num_requests_transferring") == 0
        await rig.until(lambda: value(rig, "kv_cache_usage_perc", role="decode", worker="d0") == 0)
        assert value(rig, "kv_blocks_reserved", role="decode", worker="d0") == 0
        assert value(rig, "sequences_total", outcome="cancelled") == 70
        decode.script.decode.set()
        assert (await read_all(rig.submit()))[0]


async def test_latencies_are_counted_once_a_sequence_and_phases_add_up() -> None:
    async with scheduling_rig() as rig:
        await rig.add("p0", "prefill")
        decode = await rig.add("d0", "decode", 4)
        decode.script.decode.clear()
        running, queued = rig.submit((5, 6), 14), rig.submit((5, 6), 14)
        await rig.until(lambda: rig.dispatcher.num_in_phase(MODEL.name, SequencePhase.RESERVING) == 1)
        decode.script.decode.set()
        ends = [end for _, end in await asyncio.gather(read_all(running), read_all(queued))]
        assert value(rig, "time_to_first_token_seconds_count") == 2
        assert value(rig, "inter_token_latency_seconds_count") == 2 * 13
        assert value(rig, "generation_tokens_total") == 28
        assert value(rig, "prompt_tokens_total") == 4
        assert value(rig, "e2e_request_latency_seconds_count") == 2
        phases = sum(value(rig, f"request_{phase}_time_seconds_sum") or 0 for phase in ("queue", "reserve", "prefill"))
        assert value(rig, "time_to_first_token_seconds_sum") == pytest.approx(phases)
        assert phases == pytest.approx(sum(end.timings.ttft_s for end in ends))


async def test_a_workers_prefix_index_is_counted_in_tokens() -> None:
    async with scheduling_rig() as rig:
        worker = await rig.add("p0", "prefill")
        worker.totals = fleet_pb2.WorkerTotals(prefix_queries=500, prefix_hits=320)
        worker.report()
        of_worker = {"role": "prefill", "worker": "p0"}
        await rig.until(lambda: value(rig, "prefix_cache_queries_total", **of_worker) == 500)
        assert value(rig, "prefix_cache_hits_total", **of_worker) == 320


async def test_what_a_worker_sent_is_counted_by_transport() -> None:
    async with scheduling_rig() as rig:
        worker = await rig.add("p0", "prefill")
        sent = [
            fleet_pb2.TransportTotals(transport="shm", num_completed=7, num_bytes=5000, seconds=0.5),
            fleet_pb2.TransportTotals(transport="grpc", num_failed=2),
        ]
        worker.totals = fleet_pb2.WorkerTotals(transports=sent)
        worker.report()
        labels = {"role": "prefill", "worker": "p0"}
        await rig.until(lambda: value(rig, "kv_transfers_completed_total", **labels, transport="shm") == 7)
        assert value(rig, "kv_transfer_bytes_total", **labels, transport="shm") == 5000
        assert value(rig, "kv_transfer_seconds_total", **labels, transport="shm") == 0.5
        assert value(rig, "kv_transfers_failed_total", **labels, transport="grpc") == 2


async def test_a_workers_series_vanish_with_it() -> None:
    async with scheduling_rig() as rig:
        await rig.add("p0", "prefill")
        decode = await rig.add("d0", "decode")
        await rig.until(lambda: value(rig, "kv_blocks_free", role="decode", worker="d0") == 256)
        await decode.leave()
        await rig.until(lambda: rig.state(decode) is None)
        exported = generate_latest(rig.scheduling.metrics.registry).decode()
        assert 'worker="d0"' not in exported
        assert 'worker="p0"' in exported


async def test_rejections_are_counted_by_reason_and_sequence() -> None:
    async with scheduling_rig() as rig:
        with pytest.raises(PdserveError):
            rig.submit()
        assert value(rig, "rejections_total", reason="no_workers") == 1
        assert value(rig, "sequences_total", outcome="no_workers") is None


def test_client_input_creates_no_series() -> None:
    """H04: model names that are not served share one label."""
    metrics = Metrics(frozenset({"tiny"}), max_deadline_s=60.0)
    metrics.rejected("name-0", "model_not_found", 1)
    before = len(generate_latest(metrics.registry).splitlines())
    for i in range(1000):
        metrics.rejected(f"name-{i}", "model_not_found", 1)
    assert len(generate_latest(metrics.registry).splitlines()) == before


@pytest.mark.parametrize("max_deadline_s", [1.0, 60.0, 3600.0])
def test_buckets_reach_from_5_ms_to_the_longest_deadline(max_deadline_s: float) -> None:
    metrics = Metrics(frozenset({"tiny"}), max_deadline_s)
    metrics.tokens("tiny", 1, 0.001)
    metrics.first_token("tiny", SequenceTimings(), 1)
    for name in ("inter_token_latency_seconds", "time_to_first_token_seconds"):
        bounds = [
            float(sample.labels["le"])
            for family in metrics.registry.collect()
            for sample in family.samples
            if sample.name == f"pdserve:{name}_bucket"
        ]
        assert min(bounds) <= 0.005
        assert sorted(bounds)[-2] >= max_deadline_s


def test_outcomes_are_those_of_client_requests() -> None:
    metrics = Metrics(frozenset({"tiny"}), 60.0)
    for outcome in ("stop", "stop", "deadline_exceeded"):
        metrics.generation_ended(GenerationRecord("tiny", outcome, 1, 1, 0.1))
    assert dict(metrics.outcomes) == {"stop": 2, "deadline_exceeded": 1}
    assert metrics.registry.get_sample_value("pdserve:requests_total", {"model": "tiny", "outcome": "stop"}) == 2
