"""Bench workers together: one pair, or one colocated worker, and a coordinator, checked to be empty at the end."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.worker_bench import BenchWorker, Coordinator


@asynccontextmanager
async def fleet(
    prefill: BenchWorker | None = None, decode: BenchWorker | None = None, *, colocated: bool = False
) -> AsyncIterator[Coordinator]:
    """Two workers (or one colocated) and a coordinator; at the end everything must have been given back."""
    first = prefill or BenchWorker("colocated" if colocated else "prefill")
    workers = [first] if colocated else [first, decode or BenchWorker("decode")]
    for worker in workers:
        await worker.start()
    coordinator = Coordinator(workers[0], workers[-1])
    try:
        yield await coordinator.connected()
        for worker in workers:
            await worker.until_empty()
    finally:
        await coordinator.close()
        for worker in workers:
            await worker.stop()


def prompt_of(length: int, start: int = 1) -> list[int]:
    return [1 + (start * 13 + i * 5) % 96 for i in range(length)]
