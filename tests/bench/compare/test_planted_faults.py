"""The attribution against a real fleet: each planted fault is named, and nothing else; without one, nothing is."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve_bench.compare.attribution import Finding, causes, compare_phases
from pdserve_bench.compare.phase_changes import Quantity
from pdserve_bench.compare.phases import Phase
from pdserve_bench.load.records import RunResult
from tests.support.planted_faults import Costs, run_load, slowed_fleet, small_load, undisturbed

pytestmark = pytest.mark.slow

NUM_REQUESTS, GAP_S = 22, 0.15


async def runs_by_name(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, RunResult]:
    """Controls and faults in turns, so that a machine that slows down meanwhile slows both."""
    base, plan = Costs(), small_load(NUM_REQUESTS, GAP_S)
    runs: dict[str, RunResult] = {}

    async with slowed_fleet(model, folder, monkeypatch) as fleet:

        async def run(name: str, costs: Costs) -> None:
            runs[name] = await undisturbed(lambda: run_load(fleet, plan, costs, name))

        await run_load(fleet, small_load(3, 0.05), base, "warm-up")
        await run("control 1", base)
        await run("stall", replace(base, prefill_s=base.prefill_s + 0.050))
        await run("control 2", base)
        await run("transfer", replace(base, transfer_s=2 * base.transfer_s))
        await run("control 3", base)
        await run("decode", replace(base, decode_step_s=2 * base.decode_step_s))
    return runs


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunResult]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield asyncio.run(runs_by_name(tiny_model, tmp_path_factory.mktemp("costs"), monkeypatch))


def found(runs: dict[str, RunResult], subject: str) -> list[Finding]:
    """The third control only widens the noise."""
    return compare_phases([runs["control 1"], runs["control 2"]], [runs[subject]], [runs["control 3"]])


def test_nothing_is_named_without_a_fault(runs: dict[str, RunResult]) -> None:
    assert compare_phases([runs["control 1"], runs["control 2"]], [runs["control 3"]]) == []


def test_a_stall_of_50_ms_per_prefill_is_named(runs: dict[str, RunResult]) -> None:
    (stall,) = causes(found(runs, "stall"))
    assert (stall.phase, stall.quantity) == (Phase.PREFILL, Quantity.PREFILL_FIXED)
    assert stall.amount_s == pytest.approx(0.050, abs=0.025)
    assert "fixed cost per prefill grew" in stall.kind


def test_doubled_transfer_time_is_named(runs: dict[str, RunResult]) -> None:
    (slow,) = causes(found(runs, "transfer"))
    assert (slow.phase, slow.quantity) == (Phase.TRANSFER, Quantity.TRANSFER)
    assert "exposed transfer" in slow.kind


def test_halved_decode_rate_is_named(runs: dict[str, RunResult]) -> None:
    (slow,) = causes(found(runs, "decode"))
    assert (slow.phase, slow.quantity) == (Phase.DECODE, Quantity.DECODE_TOKEN)
    assert "decode rate" in slow.kind
