"""A whole comparison, on fleets that answer at once: turns, freezing, resuming, interrupts, bands and judgements."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pdserve_bench.compare.measure as measure_module
from pdserve_bench.compare.comparison import ComparisonResult, Measurement
from pdserve_bench.compare.fleets import FleetSpec
from pdserve_bench.compare.fresh_prompts import SALT
from pdserve_bench.compare.measure import CompareOptions
from pdserve_bench.compare.noise import FIGURES, Verdict
from pdserve_bench.compare.run import compare
from pdserve_bench.compare.store import Store
from pdserve_bench.foreign_cpu import CpuReading
from pdserve_bench.load.client import Answer, NoteTokens, RequestError
from pdserve_bench.load.plan import LoadPlan, PlannedRequest
from pdserve_bench.load.records import RunResult
from pdserve_bench.measures.summary import Slo
from pdserve_bench.peer.client import ServerError
from tests.bench.compare.runs import small_plan

ITL, _, GOODPUT, _ = FIGURES
PLANS = {1.0: [small_plan(seed=1), small_plan(seed=2)], 2.0: [small_plan(seed=3), small_plan(seed=4)]}
SLO = Slo(ttft_s=5.0, itl_s=5.0)
Hook = Callable[[PlannedRequest], None]


class FakeFleet:
    """Answers with `itl_s` between tokens. `log`: what happened to all fleets of a test, in order."""

    def __init__(self, name: str, log: list[str], itl_s: float = 0.0, on_send: Hook | None = None) -> None:
        self.spec = FleetSpec(name, f"serve {name}", "http://127.0.0.1:9")
        self.model = "fake"
        self.metrics_url = ""
        self.itl_s = itl_s
        self.prompts: list[tuple[int, ...]] = []
        self.on_send = on_send
        self._log = log
        self._running = False

    def client(self) -> "FakeFleet":
        assert self._running, "a client of a frozen fleet"
        return self

    def freeze(self) -> None:
        self._running = False
        self._log.append(f"freeze {self.spec.name}")

    def thaw(self) -> None:
        self._running = True
        self._log.append(f"thaw {self.spec.name}")

    def cpu_s(self) -> float:
        return 0.0

    def pids_by_name(self) -> dict[str, int]:
        return {"launcher": os.getpid()}

    def describe(self) -> dict[str, object]:
        return {"command": self.spec.command, "pinning": {"launcher": [0, 1]}}

    async def send(self, request: PlannedRequest, note: NoteTokens) -> Answer:
        self.prompts.append(request.token_ids)
        if self.on_send is not None:
            self.on_send(request)
        for index in range(request.max_tokens):
            if index and self.itl_s:
                await asyncio.sleep(self.itl_s)
            note(1)
        return Answer("length", request.max_tokens, None, True, "x")

    async def close(self) -> None:
        self._log.append(f"close {self.spec.name}")


class FakeMeter:
    """Foreign cores of each run, as a test says; 0 once it has said all."""

    def __init__(self, *foreign_cores: float) -> None:
        self._foreign_cores = iter(foreign_cores)
        self._busy_s = 0.0
        self._num_reads = 0

    def read(self) -> CpuReading:
        """The second of each pair of readings ends a run of one second."""
        if self._num_reads % 2:
            self._busy_s += next(self._foreign_cores, 0.0)
        self._num_reads += 1
        return CpuReading(float(self._num_reads), self._busy_s, 0.0)


@pytest.fixture(autouse=True)
def meter(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The machine is quiet unless a test says otherwise."""

    def use(*foreign_cores: float) -> None:
        monkeypatch.setattr(measure_module, "CpuMeter", lambda _: FakeMeter(*foreign_cores))

    use()
    return use


def compared(folder: Path, fleets: list[FakeFleet], **changes: Any) -> tuple[ComparisonResult, list[Measurement]]:
    notes: list[Measurement] = []
    plans = changes.pop("plans", PLANS)
    options = CompareOptions(**{"num_warm_ups": 1, "revision": "r1", **changes})
    return compare(fleets, plans, SLO, Store(folder), notes.append, options), notes


def test_every_cell_is_measured_with_all_others_frozen(tmp_path: Path) -> None:
    log: list[str] = []
    result, notes = compared(tmp_path, [FakeFleet("A", log), FakeFleet("B", log)], baseline="B")
    assert not result.interrupted
    assert [one.cell.label for one in notes[:6]] == ["B", "A", "B (again)", "A", "B (again)", "B"]
    turns = [line for line in log if not line.startswith("close")]
    assert len(turns) == 2 * len(notes) == 2 * 12
    for thawed, frozen in zip(turns[::2], turns[1::2], strict=True):
        assert (thawed.split()[0], frozen.split()[0]) == ("thaw", "freeze")
        assert thawed.split()[1] == frozen.split()[1]
    assert sum(line.startswith("close") for line in log) == 2 * 12  # of its warm-up and of its run
    assert set(result.by_rate) == {1.0, 2.0}
    assert {label: len(runs) for label, runs in result.by_rate[2.0].items()} == {"A": 2, "B": 2, "B (again)": 2}
    for one in notes:
        assert one.summary.completed == one.summary.offered == 3
        assert one.run.server_cpu_s.keys() == {"launcher"}
        assert len(one.run.samples) >= 2
        assert one.run.name == one.cell.label
    assert result.plans[2.0][1] == {"mix": "small", "seed": 4}
    assert result.described["A"]["pinning"] == {"launcher": [0, 1]}


def test_all_fleets_get_the_same_prompts_and_no_cache_has_seen_any(tmp_path: Path) -> None:
    fleets = [FakeFleet("A", []), FakeFleet("B", [])]
    compared(tmp_path, fleets, baseline="B")
    ours, others = (fleet.prompts for fleet in fleets)
    planned = {request.token_ids for plans in PLANS.values() for plan in plans for request in plan.requests}
    assert planned < set(ours)
    assert planned < set(others)
    assert len(ours) == 4 * (1 + 3)
    assert len(others) == 2 * len(ours)
    assert len(set(ours)) == len(ours)
    assert len(set(others)) == len(others)


def test_what_serves_fewer_is_called_worse_and_the_rest_none(tmp_path: Path) -> None:
    def refuse_half(request: PlannedRequest) -> None:
        if request.number % 2:
            raise RequestError("full", rejected=True)

    poor, good = FakeFleet("poor", [], on_send=refuse_half), FakeFleet("good", [])
    result, _ = compared(tmp_path, [poor, good], baseline="good", plans={1.0: [small_plan(6), small_plan(6, seed=2)]})
    judged = {one.figure: one for one in result.judgements}
    assert judged.keys() == set(FIGURES)
    assert {one.fleet for one in judged.values()} == {"poor"}
    assert judged[GOODPUT].ratios == (0.5, 0.5)
    assert judged[GOODPUT].verdict == Verdict("worse", 0.5)
    assert result.control_pairs(GOODPUT) == [(1.0, 1.0), (1.0, 1.0)]
    even, _ = compared(tmp_path, [FakeFleet("even", []), good], baseline="good")
    assert [even.judgement(GOODPUT, "even", rate).verdict for rate in (1.0, 2.0)] == [Verdict("none", 1.0)] * 2


def test_what_is_in_the_store_is_not_measured_again(tmp_path: Path) -> None:
    first, _ = compared(tmp_path, [FakeFleet("A", []), FakeFleet("B", [])])
    log: list[str] = []
    fleets = [FakeFleet("A", log), FakeFleet("B", log)]
    second, notes = compared(tmp_path, fleets)
    assert log == []
    assert len(notes) == 12
    assert second == first
    for changes in (
        {"revision": "r2"},
        {"conditions": {"model": "other"}},
        {"plans": {rate: [replace(plan, requests=plan.requests[:2]) for plan in of] for rate, of in PLANS.items()}},
    ):
        compared(tmp_path, fleets, **changes)
        assert len([line for line in log if line.startswith("thaw")]) == 12
        log.clear()


def test_a_noisy_run_is_repeated_once_and_else_marked(tmp_path: Path, meter: Callable[..., None]) -> None:
    meter(0.5, 0.0, 0.0, 0.5, 0.25)
    result, notes = compared(tmp_path, [FakeFleet("A", [])], plans={1.0: [small_plan(), small_plan(seed=2)]})
    assert [one.run.foreign_cores for one in notes] == [0.0, 0.0, 0.25, 0.0]
    assert [one.noisy for one in notes] == [False, False, True, False]
    assert [one.run.about.get(SALT, 0) for one in notes] == [2, 1, 3, 0]
    assert result.foreign_cores == 0.25
    assert result.noise_of(1.0, "A") == 0.25


def test_wrong_outputs_do_not_count_and_are_judged_by_what_was_sent(tmp_path: Path) -> None:
    seen: list[tuple[LoadPlan, RunResult]] = []

    def find_wrong(plan: LoadPlan, run: RunResult) -> list[int]:
        seen.append((plan, run))
        return [1]

    fleet = FakeFleet("A", [])
    result, notes = compared(tmp_path, [fleet], find_wrong=find_wrong, plans={1.0: [small_plan()]})
    assert [one.summary.num_wrong for one in notes] == [1, 1]
    assert [one.summary.num_good for one in notes] == [2, 2]
    for plan, _ in seen:
        assert {request.token_ids for request in plan.requests} <= set(fleet.prompts)
    assert seen[0][0] != seen[1][0]
    assert result.pairs(GOODPUT, "A", 1.0) == [(2 / 3, 2 / 3)]


@pytest.mark.timeout(60)
def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    """The run it hits is measured again the next time; whatever was before it is not."""
    log: list[str] = []

    def interrupt(request: PlannedRequest) -> None:
        if len(fleet.prompts) == 7:
            os.kill(os.getpid(), signal.SIGINT)

    fleet = FakeFleet("A", log, itl_s=0.001, on_send=interrupt)
    plans = {1.0: [small_plan(4), small_plan(4, seed=2)]}
    result, notes = compared(tmp_path, [fleet], plans=plans)
    assert result.interrupted
    assert len(notes) == len(result.measured) == 1
    assert result.judgements == []
    assert result.band(ITL) is None
    assert log[-1] == "freeze A"
    log.clear()
    again, _ = compared(tmp_path, [fleet], plans=plans)
    assert not again.interrupted
    assert [line for line in log if line.startswith("thaw")] == ["thaw A"] * 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_between_runs_keeps_them_too(tmp_path: Path) -> None:
    fleet = FakeFleet("A", [])
    thaws: list[int] = []

    def thaw() -> None:
        thaws.append(1)
        if len(thaws) == 3:
            raise KeyboardInterrupt
        FakeFleet.thaw(fleet)

    fleet.thaw = thaw  # type: ignore[method-assign]
    result, notes = compared(tmp_path, [fleet])
    assert result.interrupted
    assert len(notes) == 2


def test_a_fleet_that_answers_nothing_ends_the_comparison_and_is_frozen(tmp_path: Path) -> None:
    def refuse(_: PlannedRequest) -> None:
        raise RequestError("out of order")

    log: list[str] = []
    with pytest.raises(ServerError, match="B completes no request: out of order"):
        compared(tmp_path, [FakeFleet("A", log), FakeFleet("B", log, on_send=refuse)])
    assert log[-1] == "freeze B"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("plans", "baseline", "said"),
    [
        ({}, "", "every rate needs as many plans"),
        ({1.0: []}, "", "nothing to measure"),
        ({1.0: [small_plan()], 2.0: []}, "", r"there are \[0, 1\]"),
        ({1.0: [LoadPlan((), 1)]}, "", "a plan without requests"),
        (PLANS, "C", "'C' is none of the fleets"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, plans: dict[float, list[LoadPlan]], baseline: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        compared(tmp_path, [FakeFleet("A", [])], plans=plans, baseline=baseline)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CompareOptions(max_tries=0)
