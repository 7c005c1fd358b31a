"""Measures cells on two servers in turns: whoever is not measured is frozen, and noisy measurements are repeated."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random

from pdserve_bench.foreign_cpu import CpuMeter, quietest
from pdserve_bench.peer.cells import Cell, Comparison, Sample, sample
from pdserve_bench.peer.client import Endpoint, Timing, complete
from pdserve_bench.peer.server import Server

FIRST_ORDINARY_ID = 256
"""Below it some vocabularies have their special tokens."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How often each cell is measured on each server, and how often again while others disturb."""

    num_repeats: int
    max_tries: int


def compare(
    ours: Server,
    peer: Server,
    cells: Sequence[Cell],
    effort: Effort,
    prompts: "RandomPrompts",
    note: Callable[[str, Cell, Sample], None],
) -> list[Comparison]:
    """Both servers in every cell, in turns; who goes first alternates. Ends with both running.

    Args:
        note: told of each sample as it is there, with the server's name.
    """
    samples = {(server, cell): list[Sample]() for server in (ours, peer) for cell in cells}
    for repeat in range(effort.num_repeats):
        for cell in cells:
            order = [ours, peer] if repeat % 2 == 0 else [peer, ours]
            for server, other in zip(order, reversed(order), strict=True):
                with _frozen(other):
                    taken = _quiet_sample(server, cell, prompts, effort.max_tries)
                samples[server, cell].append(taken)
                note(server.spec.name, cell, taken)
    return [Comparison(cell, tuple(samples[ours, cell]), tuple(samples[peer, cell])) for cell in cells]


@contextmanager
def _frozen(server: Server) -> Generator[None]:
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


def _quiet_sample(server: Server, cell: Cell, prompts: "RandomPrompts", max_tries: int) -> Sample:
    meter = CpuMeter(lambda: time.process_time() + server.cpu_s())
    measured = quietest(lambda: run_cell(server.endpoint, cell, prompts), max_tries, meter)
    return replace(measured.value, foreign_cores=measured.foreign_cores)


def run_cell(endpoint: Endpoint, cell: Cell, prompts: "RandomPrompts") -> Sample:
    """One closed loop: a client's next request follows its last one's end."""
    waiting = deque(prompts.take(cell.num_requests, cell.prompt_tokens))
    timings: list[Timing] = []

    async def client() -> None:
        while waiting:
            timings.append(await complete(endpoint, waiting.popleft(), cell.output_tokens))

    async def all_clients() -> None:
        async with asyncio.TaskGroup() as clients:
            for _ in range(cell.concurrency):
                clients.create_task(client())

    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    asyncio.run(all_clients())
    return sample(cell, timings, time.perf_counter() - begin_s, time.process_time() - begin_cpu_s)


class RandomPrompts:
    """Prompts that never come again, so that no cache of prefixes helps anybody."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._random = Random(seed)
        self._ids = range(min(FIRST_ORDINARY_ID, vocab_size - 1), vocab_size)

    def take(self, num_prompts: int, num_tokens: int) -> list[list[int]]:
        return [self._random.choices(self._ids, k=num_tokens) for _ in range(num_prompts)]
