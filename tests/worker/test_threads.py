"""The threads of a real worker process: bounded, pinned, and reported."""

import asyncio
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve.launch.plan import ChildPlan
from pdserve.launch.process import ChildProcess, Exited, Started, child_command
from pdserve.launch.roles import POOL_VARIABLES
from tests.support.fleet import START_S, Fleet, run_fleet

POOLS, THREADS_THAT_COMPUTE = 2, 2
"""OpenMP's and numba's; the main thread, which warms the kernels up, and the engine's."""
OTHERS = 6
"""Threads that Python starts and that wait: the event loop's helpers, gRPC's, the launcher's watch, the log's."""
GRPC_NAMES = {"event_engine", "grpc_global_tim", "lifeguard"}


def _bound(threads: int) -> int:
    return THREADS_THAT_COMPUTE + OTHERS + POOLS * THREADS_THAT_COMPUTE * (threads - 1)


def _tasks(pid: int) -> dict[int, str]:
    """Each thread's name, without gRPC's own, whose number follows the cores."""
    folder = Path(f"/proc/{pid}/task")
    names = {int(task.name): (task / "comm").read_text().strip() for task in folder.iterdir()}
    return {task: name for task, name in names.items() if name not in GRPC_NAMES}


async def _worker(fleet: Fleet, threads: int, cores: Sequence[int]) -> tuple[ChildProcess, asyncio.Future[int]]:
    """A colocated worker, serving; started without the pools' variables, as `pdserve worker` starts it."""
    settings = fleet.settings(worker_id="w", coordinators=[fleet.grpc_address], threads=threads, cores=cores)
    settings = settings.model_copy(update={"log_level": "info"})
    loop = asyncio.get_running_loop()
    started, exited = loop.create_future(), loop.create_future()

    def publish(event: Started | Exited) -> None:
        future = started if isinstance(event, Started) else exited
        loop.call_soon_threadsafe(future.set_result, getattr(event, "code", None))

    process = ChildProcess(ChildPlan("colocated", "w", settings), publish, child_command)
    await asyncio.wait({started, exited}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
    assert started.done()
    return process, exited


@pytest.mark.parametrize("threads", [1, 2])
async def test_a_worker_computes_with_as_many_threads_as_it_is_told(
    tiny_model: Path, threads: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in POOL_VARIABLES:
        monkeypatch.setenv(name, "13")
    cores = sorted(os.sched_getaffinity(0))[-threads:]
    async with run_fleet(tiny_model, ()) as fleet:
        process, exited = await _worker(fleet, threads, cores)
        try:
            prompts = [[5] * 200 + [number] for number in range(4)]
            await asyncio.gather(*(fleet.generate(prompt, max_tokens=20, ignore_eos=True) for prompt in prompts))
            tasks = _tasks(process.pid)
            assert len(tasks) <= _bound(threads)
            assert {frozenset(os.sched_getaffinity(task)) for task in tasks} == {frozenset(cores)}
        finally:
            process.terminate()
            await exited
    report = re.search(r"compute threads: (.*); cores (.*)", capfd.readouterr().err)
    assert report is not None
    assert set(re.findall(r"\d+", report[1])) == {str(threads)}
    assert report[2] == ", ".join(map(str, cores))
