"""docs/metrics.md names every series that is exported, with its kind and labels, and no other."""

import re
from pathlib import Path

import pytest
from prometheus_client.core import Metric

from coordinator.generation.generator import GenerationRecord
from coordinator.metrics import Metrics
from coordinator.sequences import SequenceTimings
from pdserve.v1 import fleet_pb2
from tests.support.scheduling_rig import scheduling_rig
from tests.support.scripted_worker import MODEL

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"\| `(pdserve:\w+)` \| (\w+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|")
UNITS = {"s", "requests", "sequences", "tokens", "blocks", "bytes", "transfers", "share, 0 to 1"}


def rows() -> list[tuple[str, str, tuple[str, ...], str]]:
    """Name, kind, labels and unit of every row of every table."""
    found = [ROW.fullmatch(line) for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert None not in found
    return [(m[1], m[2], tuple(re.findall(r"`(\w+)`", m[3])), m[4]) for m in found if m is not None]


def one_of_each(metrics: Metrics) -> None:
    """A sample in every series that events make."""
    timings = SequenceTimings(decode_worker="d0")
    metrics.rejected(MODEL.name, "queue_full", 1)
    metrics.retried(MODEL.name)
    metrics.first_token(MODEL.name, timings, 1)
    metrics.tokens(MODEL.name, 1, 0.1)
    metrics.finished(MODEL.name, "stop", timings, 1.0)
    metrics.generation_ended(GenerationRecord(MODEL.name, "stop", 1, 1, 1.0))


def shown(family: Metric) -> tuple[str, str, tuple[str, ...]]:
    assert family.samples, f"{family.name} has no sample to read its labels from"
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return name, family.type, tuple(label for label in family.samples[0].labels if label != "le")


async def test_the_page_has_every_series_and_no_other() -> None:
    async with scheduling_rig() as rig:
        worker = await rig.add("p0", "prefill")
        sent = fleet_pb2.TransportTotals(transport="shm", num_completed=1)
        worker.totals = fleet_pb2.WorkerTotals(transports=[sent])
        worker.report()
        metrics = rig.scheduling.metrics
        one_of_each(metrics)
        of_worker = {"model": MODEL.name, "role": "prefill", "worker": worker.name}
        registry = metrics.registry
        of_transport = {**of_worker, "transport": "shm"}
        await rig.until(lambda: registry.get_sample_value("pdserve:kv_transfers_completed_total", of_transport) == 1)
        assert registry.get_sample_value("pdserve:kv_blocks_usable", of_worker) is not None
        exported = [shown(family) for family in registry.collect()]
    assert len(exported) > 20
    assert sorted(row[:3] for row in rows()) == sorted(exported)


@pytest.mark.parametrize(("name", "kind", "labels", "unit"), rows())
def test_units_are_those_of_the_names(name: str, kind: str, labels: tuple[str, ...], unit: str) -> None:
    assert unit in UNITS
    assert name.removesuffix("_total").endswith("_seconds") == (unit == "s")
    assert name.endswith("_seconds") == (kind == "histogram")
    assert ("worker" in labels) == ("role" in labels)
    assert ("tokens" in name.split(":")[1].split("_") or "prefix_cache" in name) == (unit == "tokens") or unit == "s"
