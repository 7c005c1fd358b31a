"""A real fleet of processes, prefill and decode apart, whose workers sleep as a test tells them to while they run.

Every phase has a set base cost of tens of ms, so that a tiny model's own time and a busy machine hardly show; a fault
adds to one of them. The workers read the costs from a file at each step, so one fleet serves control and faults alike.
As a script, this is a worker's or the coordinator's process; the model, scheduler, RPCs and KV transfer are the real
ones.
"""

import asyncio
import importlib
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.client.inference import Delta, Finished, GenerateOptions
from pdserve_bench.load.plan import LoadPlan, PlannedRequest
from pdserve_bench.load.records import (
    ClientLimits,
    Outcome,
    RequestRecord,
    RunResult,
    ServerTimings,
    TokenEvent,
)
from tests.support import fleet as fleet_support
from tests.support.fleet import Fleet, run_fleet

COSTS_FILE = "PDSERVE_TEST_COSTS"
TICK_S, MAX_LAG_S = 0.01, 0.02


@dataclass(frozen=True)
class Costs:
    """Seconds that the workers sleep: once a prefill and for each of its tokens, each transfer, each decode step."""

    prefill_s: float = 0.010
    prefill_token_s: float = 0.0001
    transfer_s: float = 0.030
    decode_step_s: float = 0.030

    def write(self) -> None:
        """For the workers, from their next step on."""
        path = Path(os.environ[COSTS_FILE])
        fresh = path.with_suffix(".fresh")
        fresh.write_text(json.dumps(asdict(self)))
        fresh.replace(path)

    @staticmethod
    def read() -> "Costs":
        return Costs(**json.loads(Path(os.environ[COSTS_FILE]).read_text()))


# --- in the test's process --------------------------------------------------------------------------------------------


@asynccontextmanager
async def slowed_fleet(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    """One prefill and one decode worker with the base costs. Prefixes are not cached: runs repeat their prompts."""
    monkeypatch.setenv(COSTS_FILE, str(folder / "costs.json"))
    monkeypatch.setattr(fleet_support, "child_command", _command)
    Costs().write()
    worker = {"kernels": "torch", "prefix_cache": False}
    async with run_fleet(model, ("prefill", "decode"), worker=worker) as fleet:
        yield fleet


def _command(role: str, control_fd: int, ready_fd: int) -> list[str]:
    fds = ["--control-fd", str(control_fd), "--ready-fd", str(ready_fd)]
    return [sys.executable, "-m", __name__, role, *fds]


def small_load(num_requests: int, gap_s: float, seed: int = 5) -> LoadPlan:
    """One every `gap_s`, with 3 output tokens. Prompts of 16 to 320 tokens, most of them short, so that what a prefill
    costs whatever its length shows well."""
    draw = random.Random(seed)
    lengths = [round(16 * 20 ** draw.random()) for _ in range(num_requests)]
    requests = tuple(
        PlannedRequest(number, number * gap_s, tuple(draw.choices(range(3, 300), k=length)), 3)
        for number, length in enumerate(lengths)
    )
    return LoadPlan(requests, seed)


async def run_load(fleet: Fleet, plan: LoadPlan, costs: Costs, name: str) -> RunResult:
    """The plan, open loop, under `costs`; all must be completed. Of the client's limits it measures the loop's lag."""
    costs.write()
    begin_s, begin_unix_s = time.monotonic(), time.time()
    lags_s: list[float] = []
    watching = asyncio.create_task(_watch(lags_s))
    async with asyncio.TaskGroup() as tasks:
        sent = [tasks.create_task(_send(fleet, request, begin_s)) for request in plan.requests]
    watching.cancel()
    limits = ClientLimits(float(np.quantile(lags_s, 0.99)), max(lags_s), 0.0, 0.0, 0)
    records = tuple(task.result() for task in sent)
    return RunResult(name, asdict(costs), begin_unix_s, time.monotonic() - begin_s, records, limits)


async def undisturbed(measure: Callable[[], Awaitable[RunResult]], max_tries: int = 2) -> RunResult:
    """The first run in which this process's own timers were on time, or else the one in which they were least late: a
    machine that stands still for others' sake says nothing of the fleet."""
    tries: list[RunResult] = []
    while not tries or (tries[-1].limits.loop_lag_p99_s > MAX_LAG_S and len(tries) < max_tries):
        tries.append(await measure())
    return min(tries, key=lambda run: run.limits.loop_lag_p99_s)


async def _watch(lags_s: list[float]) -> None:
    while True:
        begin_s = time.monotonic()
        await asyncio.sleep(TICK_S)
        lags_s.append(time.monotonic() - begin_s - TICK_S)


async def _send(fleet: Fleet, request: PlannedRequest, begin_s: float) -> RequestRecord:
    def now_s() -> float:
        return time.monotonic() - begin_s

    await asyncio.sleep(request.at_s - now_s())
    sent_s, events = now_s(), list[TokenEvent]()
    record = RequestRecord(
        request.number, "default", "", len(request.token_ids), request.max_tokens, request.at_s, Outcome.COMPLETED
    )
    options = GenerateOptions(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)
    finished: Finished | None = None
    async with aclosing(fleet.client.generate(request.token_ids, options)) as stream:
        async for event in stream:
            if isinstance(event, Delta) and event.token_ids:
                events.append(TokenEvent(now_s(), len(event.token_ids)))
            elif isinstance(event, Finished):
                finished = event
    assert finished is not None
    return replace(
        record,
        sent_s=sent_s,
        ended_s=now_s(),
        events=tuple(events),
        num_output_tokens=finished.usage.completion_tokens,
        num_cached_tokens=finished.usage.cached_tokens,
        finish_reason=finished.finish_reason.value,
        server=ServerTimings(**{name: getattr(finished.timings, name) for name in ServerTimings.__slots__}),
    )


# --- in a worker's process --------------------------------------------------------------------------------------------


class SlowedRunner:
    """The model's own runner, after a sleep. Prompts and rows of decode never meet in one worker here."""

    def __init__(self, runner: Any, role: str) -> None:
        self._runner = runner
        self._role = role

    def run(self, chunks: Sequence[Any]) -> list[Any]:
        costs = Costs.read()
        if self._role == "decode":
            time.sleep(costs.decode_step_s)
        else:
            num_prompts_done = sum(chunk.sample for chunk in chunks)
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            time.sleep(num_prompts_done * costs.prefill_s + num_tokens * costs.prefill_token_s)
        results: list[Any] = self._runner.run(chunks)
        return results


def slow_transfers() -> None:
    """Every batch of KV blocks takes longer on its way, as over a slower link."""
    from kv_transfer.over_grpc.link import GrpcLink
    from kv_transfer.over_shm.link import ShmLink

    def slowed(send: Any) -> Any:
        def slow_send(link: Any, batch: Any, timeout_s: float) -> int:
            time.sleep(Costs.read().transfer_s)
            sent: int = send(link, batch, timeout_s)
            return sent

        return slow_send

    for kind in (GrpcLink, ShmLink):
        kind.send = slowed(kind.send)  # type: ignore[method-assign]


def load_slowed(role: str) -> Any:
    """As `load_service`, with the sleeps built in."""
    from pdserve.launch.roles import MODULES

    service = importlib.import_module(MODULES[role])
    if role != "coordinator":
        from pdserve.worker import process

        load = process.load
        process.load = lambda *args: _slowed(load(*args), role)
        slow_transfers()
    return service.run


def _slowed(loaded: Any, role: str) -> Any:
    return replace(loaded, runner=SlowedRunner(loaded.runner, role))


if __name__ == "__main__":
    from pdserve.launch.child import main

    sys.exit(main(load=load_slowed))
