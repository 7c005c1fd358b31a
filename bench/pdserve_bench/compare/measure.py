"""One fleet under one plan: thawed, warmed, measured, frozen again. Knows no other fleet but by its CPU time."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from pdserve_bench.compare.fleet_specs import FleetSpec
from pdserve_bench.compare.fresh_prompts import relabelled, warm_up_plan
from pdserve_bench.compare.schedule import Cell
from pdserve_bench.compare.server_view import ServerView
from pdserve_bench.compare.store import conditions_digest, plan_digest, sources_revision
from pdserve_bench.foreign_cpu import MAX_FOREIGN_CORES, CpuMeter
from pdserve_bench.load.client import LoadClient
from pdserve_bench.load.generator import Progress, RunOptions, run_plan
from pdserve_bench.load.plan import LoadPlan
from pdserve_bench.load.records import Outcome, RunResult
from pdserve_bench.peer.client import ServerError

WARM_UP_S = 120.0

FindWrong = Callable[[LoadPlan, RunResult], Collection[int]]
"""Numbers of the requests whose output was wrong. The plan is the one that was sent."""


class Measurable(Protocol):
    """What is asked of a fleet; `fleets.Fleet` is one. It is frozen except while it is measured."""

    @property
    def spec(self) -> FleetSpec: ...

    @property
    def model(self) -> str: ...

    @property
    def metrics_url(self) -> str: ...

    def client(self) -> LoadClient: ...

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...

    def cpu_s(self) -> float: ...

    def pids_by_name(self) -> dict[str, int]: ...

    def describe(self) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """`baseline`: by default the first fleet. `max_tries`: of a run that others disturb; the quietest counts.

    `conditions`: what else the runs depend on, such as the model's fingerprint, as JSON. `revision`: of the sources; ""
    looks it up.
    """

    baseline: str = ""
    max_tries: int = 2
    num_warm_ups: int = 4
    run: RunOptions = field(default_factory=RunOptions)
    conditions: Mapping[str, object] = field(default_factory=dict[str, object])
    revision: str = ""
    find_wrong: FindWrong | None = None
    on_progress: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        if self.max_tries < 1 or self.num_warm_ups < 1:
            raise ValueError(f"{self.max_tries} tries, {self.num_warm_ups} warm-ups: at least 1 of each")


class Measurer:
    """All runs share the event loop of `runner`, which is not running in between. `fleets`: all that are up."""

    def __init__(self, fleets: Sequence[Measurable], options: CompareOptions, runner: asyncio.Runner) -> None:
        self._options = options
        self._runner = runner
        self._revision = options.revision or sources_revision()
        self._meter = CpuMeter(lambda: time.process_time() + sum(fleet.cpu_s() for fleet in fleets))

    def digest(self, fleet: Measurable, plan: LoadPlan) -> str:
        """Equal for runs of it under equal conditions."""
        settings = {
            "fleet": fleet.spec.identity,
            "model": fleet.model,
            "plan": plan_digest(plan),
            "run": asdict(self._options.run),
            "num_warm_ups": self._options.num_warm_ups,
            **self._options.conditions,
        }
        return conditions_digest(settings, self._revision)

    def measure(self, fleet: Measurable, plan: LoadPlan, cell: Cell) -> RunResult:
        """The quietest of at most `max_tries`, the first that is not noisy, or one that Ctrl-C cut short.

        No two runs of a fleet within a round send the same prompts, though they are of the same shape.

        Raises:
            ServerError: it is gone, or answers nothing.
        """
        tries: list[RunResult] = []
        fleet.thaw()
        try:
            self._runner.run(self._warm_up(fleet, plan, salt=int(cell.again)))
            while len(tries) < self._options.max_tries:
                salt = int(cell.again) + 2 * len(tries)
                tries.append(self._measured(fleet, relabelled(plan, salt), cell))
                if tries[-1].interrupted or tries[-1].foreign_cores <= MAX_FOREIGN_CORES:
                    return tries[-1]
        finally:
            fleet.freeze()
        return min(tries, key=lambda run: run.foreign_cores)

    def _measured(self, fleet: Measurable, plan: LoadPlan, cell: Cell) -> RunResult:
        begin = self._meter.read()
        run = self._runner.run(self._run(fleet, plan, cell))
        return replace(run, foreign_cores=self._meter.read().foreign_cores_since(begin))

    async def _run(self, fleet: Measurable, plan: LoadPlan, cell: Cell) -> RunResult:
        options, client = self._options, fleet.client()
        try:
            async with ServerView(fleet.pids_by_name(), fleet.metrics_url) as view:
                with _stopped_by_interrupt() as stop:
                    run = await run_plan(plan, client, options.run, cell.label, options.on_progress, stop)
        finally:
            await client.close()
        return replace(run, samples=view.samples(run.begin_unix_s), server_cpu_s=view.cpu_s)

    async def _warm_up(self, fleet: Measurable, plan: LoadPlan, salt: int) -> None:
        client, warm_up = fleet.client(), warm_up_plan(plan, self._options.num_warm_ups, salt)
        try:
            run = await run_plan(warm_up, client, RunOptions(drain_s=WARM_UP_S), "warm-up")
        finally:
            await client.close()
        if not any(record.outcome is Outcome.COMPLETED for record in run.records):
            errors = {record.error or record.outcome.value for record in run.records}
            raise ServerError(f"{fleet.spec.name} completes no request: {'; '.join(sorted(errors))}")


@contextmanager
def _stopped_by_interrupt() -> Generator[asyncio.Event]:
    """Set by the first Ctrl-C, so that what came until then is kept; a second one is as it was before."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def ask() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    if threading.current_thread() is threading.main_thread():
        loop.add_signal_handler(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)
