"""One server that is measured: its client, its warm-up, what it shows of itself, and Ctrl-C. Judges nothing."""

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

import aiohttp
import psutil

from pdserve_bench.compare.fresh_prompts import warm_up_plan
from pdserve_bench.compare.server_view import ServerView
from pdserve_bench.foreign_cpu import CpuMeter
from pdserve_bench.load.client import LoadClient, RequestError
from pdserve_bench.load.generator import Progress, RunOptions, run_plan
from pdserve_bench.load.openai_http import OpenAiClient, served_model
from pdserve_bench.load.plan import LoadPlan
from pdserve_bench.load.records import Outcome, RunResult
from pdserve_bench.serve.options import CannotMeasureError, ServerOptions

_METRICS_TIMEOUT_S = 5.0

OnProgress = Callable[[str, Progress], None]
"""Told of the run by its name, and how far it is."""


@dataclass(frozen=True, slots=True)
class Session:
    """`stop`: set once the user has had enough. `model`: as the server calls it, "" over gRPC. `metrics_url` "": the
    server has no such page."""

    server: ServerOptions
    client: LoadClient
    model: str
    metrics_url: str
    stop: asyncio.Event
    on_progress: OnProgress

    async def warm_up(self, plan: LoadPlan, num_requests: int) -> None:
        """With prompts that share no block with those of `plan`.

        Raises:
            RequestError: one of them failed.
        """
        if not num_requests:
            return
        warm_up = warm_up_plan(plan, num_requests, 0)
        run = await run_plan(warm_up, self.client, RunOptions(), "warm-up", self.progress("warm-up"), self.stop)
        for record in run.records:
            if record.outcome in (Outcome.FAILED, Outcome.REJECTED):
                raise RequestError(f"a warm-up request failed: {record.error}")

    async def run(self, plan: LoadPlan, options: RunOptions, name: str) -> RunResult:
        """As `run_plan`, with what the server showed of itself."""
        async with self.watched() as watch:
            run = await run_plan(plan, self.client, options, name, self.progress(name), self.stop)
        return watch.completed(run)

    @asynccontextmanager
    async def watched(self) -> AsyncGenerator["Watch"]:
        pids = _tree(self.server.server_pid)
        view = ServerView({f"{name}-{pid}": pid for pid, name in pids.items()}, self.metrics_url)
        own_pids = [psutil.Process().pid, *pids]
        watch = Watch(view, CpuMeter(lambda: _cpu_seconds(own_pids)) if pids else None)
        async with view:
            watch.begin()
            yield watch
            watch.end()

    def progress(self, name: str) -> Callable[[Progress], None]:
        return lambda progress: self.on_progress(name, progress)


class Watch:
    """The server's CPU time and metrics during a run, and what others took where the server's processes are known."""

    def __init__(self, view: ServerView, meter: CpuMeter | None) -> None:
        self._view = view
        self._meter = meter
        self.foreign_cores = 0.0

    def begin(self) -> None:
        self._begin = self._meter.read() if self._meter else None

    def end(self) -> None:
        if self._meter and self._begin:
            self.foreign_cores = self._meter.read().foreign_cores_since(self._begin)

    def completed(self, run: RunResult) -> RunResult:
        return replace(
            run,
            foreign_cores=self.foreign_cores,
            server_cpu_s=self._view.cpu_s,
            samples=self._view.samples(run.begin_unix_s),
        )


@asynccontextmanager
async def opened(server: ServerOptions, on_progress: OnProgress) -> AsyncGenerator[Session]:
    """Ctrl-C sets `stop` the first time, and ends the process the second time.

    Raises:
        RequestError: nobody answers there.
        CannotMeasureError: there is no such process.
    """
    if server.server_pid:
        _tree(server.server_pid)
    keys = {"": server.api_key}
    stop, model = asyncio.Event(), server.model
    client: LoadClient
    if server.protocol == "http":
        model = model or await served_model(server.base_url, server.api_key)
        client = OpenAiClient(server.base_url, model, endpoint=server.endpoint, api_keys=keys)
    else:
        from pdserve_bench.load.pdserve_grpc import PdserveClient

        client = PdserveClient(server.address, api_keys=keys)
    try:
        with _interruptible(stop):
            yield Session(server, client, model, await _metrics_url(server), stop, on_progress)
    finally:
        await client.close()


async def _metrics_url(server: ServerOptions) -> str:
    url = server.base_url.rstrip("/") + "/metrics"
    timeout = aiohttp.ClientTimeout(total=_METRICS_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            return url if response.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError):
        return ""


@contextmanager
def _interruptible(stop: asyncio.Event) -> Generator[None]:
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)

    def first() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    loop.add_signal_handler(signal.SIGINT, first)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


def _tree(pid: int) -> dict[int, str]:
    """Names of a process and of all below it, by process id. None for 0."""
    if not pid:
        return {}
    try:
        top = psutil.Process(pid)
        return {process.pid: process.name() for process in (top, *top.children(recursive=True))}
    except psutil.Error as error:
        raise CannotMeasureError(f"--server-pid {pid}: {error}") from None


def _cpu_seconds(pids: list[int]) -> float:
    """Of those that still run."""
    total_s = 0.0
    for pid in pids:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += times.user + times.system
    return total_s
