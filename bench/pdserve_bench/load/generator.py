"""Runs a plan against a server in an open loop: a slow server is not asked less. Knows no protocol, judges nothing."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass

from pdserve_bench.load.client import LoadClient, RequestError
from pdserve_bench.load.flight import Flight, HangUp, verdict
from pdserve_bench.load.own_limits import OwnLimitsMeter
from pdserve_bench.load.plan import LoadPlan
from pdserve_bench.load.records import ClientLimits, Outcome, RunResult

_PROGRESS_S = 0.25


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`max_concurrency`: requests beyond it wait in the client, while their latency counts from their scheduled time.
    `drain_s`: how long after the last scheduled arrival to wait for what still runs."""

    max_concurrency: int | None = None
    drain_s: float = 60.0

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency is {self.max_concurrency}: it must be at least 1")
        if self.drain_s < 0:
            raise ValueError(f"drain_s is {self.drain_s}: it must not be negative")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is. `num_sent` counts those done, too; `num_offered` is the whole plan."""

    num_sent: int
    num_done: int
    num_in_flight: int
    num_offered: int


async def run_plan(
    plan: LoadPlan,
    client: LoadClient,
    options: RunOptions,
    name: str,
    on_progress: Callable[[Progress], None] | None = None,
    stop: asyncio.Event | None = None,
) -> RunResult:
    """Send each request of `plan` at its time, until all have ended, or the drain time is over, or `stop` is set.

    What still runs then is cancelled and unfinished. The figures that the client cannot know (`foreign_cores`,
    `server_cpu_s`, `samples`) are left to the caller.

    Raises:
        ExceptionGroup: the client raised what is no RequestError.
    """
    clock_s = asyncio.get_running_loop().time
    run = _Run(plan, client, options, clock_s)
    async with OwnLimitsMeter(clock_s) as meter, _reporting(run, on_progress):
        interrupted = await run.go(stop or asyncio.Event())
        limits = run.limits(meter)
    exact = run.counts_are_exact
    return RunResult(
        name=name,
        about={**plan.about, "seed": plan.seed, "intended_hit_rate": plan.intended_hit_rate, **asdict(options)},
        begin_unix_s=run.begin_unix_s,
        duration_s=run.duration_s,
        records=tuple(flight.record(exact) for flight in run.flights),
        limits=limits,
        interrupted=interrupted,
    )


class _Run:
    def __init__(self, plan: LoadPlan, client: LoadClient, options: RunOptions, clock_s: Callable[[], float]) -> None:
        self.flights = [Flight(request) for request in plan.requests]
        self.begin_unix_s = self.duration_s = 0.0
        self._time_limit_s = plan.span_s + options.drain_s
        self._client = client
        self._clock_s = clock_s
        self._begin_s = clock_s()
        self._room = nullcontext() if options.max_concurrency is None else asyncio.Semaphore(options.max_concurrency)
        self._num_sent = self._num_done = self._peak_in_flight = 0

    async def go(self, stop: asyncio.Event) -> bool:
        """From begin to end; whether `stop` ended it."""
        self._begin_s, self.begin_unix_s = self._clock_s(), time.time()
        work, stopped = asyncio.create_task(self._send_all()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((work, stopped), timeout=self._time_limit_s, return_when=asyncio.FIRST_COMPLETED)
            self.duration_s, cut = self._now_s(), not work.done()
        finally:
            work.cancel()
            stopped.cancel()
            await asyncio.wait((work, stopped))
        if not work.cancelled():
            work.result()
        return cut and stop.is_set()

    def limits(self, meter: OwnLimitsMeter) -> ClientLimits:
        """One that was due but never sent has been late by at least the time until the run's end."""
        due = (flight for flight in self.flights if flight.request.at_s <= self.duration_s)
        lags_s = [(self.duration_s if flight.sent_s is None else flight.sent_s) - flight.request.at_s for flight in due]
        return meter.limits(lags_s, self._peak_in_flight)

    @property
    def counts_are_exact(self) -> bool:
        """Of the stream of a request that never got its answer: as of all those that did."""
        answers = [flight.answer for flight in self.flights if flight.answer is not None]
        return bool(answers) and all(answer.counts_are_exact for answer in answers)

    @property
    def progress(self) -> Progress:
        return Progress(self._num_sent, self._num_done, self._num_sent - self._num_done, len(self.flights))

    async def _send_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for flight in self.flights:
                while (wait_s := flight.request.at_s - self._now_s()) > 0:  # noqa: ASYNC110
                    await asyncio.sleep(wait_s)
                tasks.create_task(self._fly(flight))

    async def _fly(self, flight: Flight) -> None:
        async with self._room:
            flight.sent_s = self._now_s()
            self._num_sent += 1
            self._peak_in_flight = max(self._peak_in_flight, self._num_sent - self._num_done)
            try:
                flight.answer = await self._client.send(flight.request, lambda n: flight.note(self._now_s(), n))
                flight.end(self._now_s(), *verdict(flight.request, flight.answer, flight.num_counted))
            except RequestError as error:
                outcome = Outcome.REJECTED if error.rejected else Outcome.FAILED
                flight.end(self._now_s(), outcome, str(error))
            except HangUp:
                flight.end(self._now_s(), Outcome.CANCELLED)
            finally:
                self._num_done += 1

    def _now_s(self) -> float:
        return self._clock_s() - self._begin_s


@asynccontextmanager
async def _reporting(run: _Run, on_progress: Callable[[Progress], None] | None) -> AsyncGenerator[None]:
    """Progress now and then, and once at the end."""
    if on_progress is None:
        yield
        return

    async def report() -> None:
        while True:
            on_progress(run.progress)
            await asyncio.sleep(_PROGRESS_S)

    task = asyncio.create_task(report())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        on_progress(run.progress)
