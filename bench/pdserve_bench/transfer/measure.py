"""Times batches of KV blocks over each transport and its limit, in turns, between two processes on a core each."""

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from kv_transfer.interfaces import Peer
from kv_transfer.messages import Busy, CommitOrder, PrepareOrder
from kv_transfer.outbound.link import ChunkBatch, Link
from kv_transfer.outbound.source import Source
from kv_transfer.over_grpc.link import GrpcLink
from kv_transfer.over_shm.link import ShmLink
from pdserve.core.ids import SequenceId
from pdserve.engine.paged_kv import PagedKv
from pdserve_bench.foreign_cpu import CpuMeter
from pdserve_bench.transfer import parties
from pdserve_bench.transfer.limits import Limit, ShmLimit, TcpLimit

TRANSPORTS = ("shm", "grpc")
TIMEOUT_S = 60.0
NUM_WARM_UPS = 3
_BLOCK_BYTES = parties.LAYOUT.block_bytes


@dataclass(frozen=True, slots=True)
class Cell:
    """Medians for one transport and size. `whole_s`: Prepare and Commit too. CPU of both processes, in CPU seconds."""

    transport: str
    num_bytes: int
    seconds: float
    whole_s: float
    cpu_s: float
    limit: str
    limit_s: float
    limit_cpu_s: float
    foreign_cores: float

    @property
    def share_of_limit(self) -> float:
        return self.limit_s / self.seconds


@dataclass(frozen=True, slots=True)
class Timed:
    seconds: float
    cpu_s: float


def measure(
    sizes: Sequence[int], repeats: int, cores: tuple[int, int], seed: int, note: Callable[[Cell], None]
) -> list[Cell]:
    """`sizes` in bytes, each rounded to whole blocks. Pins this process.

    Raises:
        RuntimeError: the receiver ended.
    """
    os.sched_setaffinity(0, {cores[0]})
    torch.set_num_threads(1)
    counts = sorted({max(1, round(size / _BLOCK_BYTES)) for size in sizes})
    cells: list[Cell] = []
    with _parties(2 * max(counts), cores[1]) as (ours, limits, pids):
        meter = CpuMeter(lambda: _cpu_s(pids))
        rng = random.Random(seed)
        for count in counts:
            begin = meter.read()
            timed = _in_turns(ours, limits, count, repeats, pids, rng)
            foreign_cores = meter.read().foreign_cores_since(begin)
            for transport in TRANSPORTS:
                cells.append(_cell(transport, count, timed, limits[transport].name, foreign_cores))
                note(cells[-1])
    return cells


def _in_turns(
    ours: "Mapping[str, _Sender]",
    limits: Mapping[str, Limit],
    num_blocks: int,
    repeats: int,
    pids: Sequence[int],
    rng: random.Random,
) -> dict[str, list[Timed]]:
    found: dict[str, list[Timed]] = {}
    for repeat in range(NUM_WARM_UPS + repeats):
        for transport in TRANSPORTS:
            block_ids = tuple(rng.sample(range(ours[transport].num_blocks), num_blocks))
            limit = limits[transport]
            with ours[transport].transfer(num_blocks) as send:
                batch = _timed(partial(send, block_ids), pids)
            whole = Timed(ours[transport].whole_s, 0.0)
            raw = _timed(partial(limit.send, num_blocks * _BLOCK_BYTES), pids)
            if repeat >= NUM_WARM_UPS:
                for key, value in ((transport, batch), (f"{transport} whole", whole), (f"{transport} limit", raw)):
                    found.setdefault(key, []).append(value)
    return found


def _cell(transport: str, count: int, timed: Mapping[str, Sequence[Timed]], limit: str, foreign_cores: float) -> Cell:
    def middle(key: str, read: Callable[[Timed], float]) -> float:
        return median(read(one) for one in timed[key])

    return Cell(
        transport=transport,
        num_bytes=count * _BLOCK_BYTES,
        seconds=middle(transport, lambda one: one.seconds),
        whole_s=middle(f"{transport} whole", lambda one: one.seconds),
        cpu_s=middle(transport, lambda one: one.cpu_s),
        limit=limit,
        limit_s=middle(f"{transport} limit", lambda one: one.seconds),
        limit_cpu_s=middle(f"{transport} limit", lambda one: one.cpu_s),
        foreign_cores=foreign_cores,
    )


class _Sender:
    """One link, and transfers over it."""

    def __init__(self, link: Link, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.whole_s = 0.0
        self._link = link
        self._numbers = itertools.count(1)
        link.handshake(TIMEOUT_S)

    @contextmanager
    def transfer(self, num_blocks: int) -> Generator[Callable[[tuple[int, ...]], None]]:
        """Prepare, then whatever `send` sends in one batch, then Commit; `whole_s` says how long it all took."""
        number, num_tokens = next(self._numbers), num_blocks * parties.LAYOUT.block_size
        order = PrepareOrder(number, SequenceId(1, number), number, num_tokens, num_blocks, 0, TIMEOUT_S)
        num_chunks = 0

        def send(block_ids: tuple[int, ...]) -> None:
            nonlocal num_chunks
            num_chunks = self._link.send(ChunkBatch(number, 0, 0, block_ids), TIMEOUT_S)

        begin_s = time.perf_counter()
        if isinstance(self._link.prepare(order, TIMEOUT_S), Busy):
            raise RuntimeError("the receiver is busy with nothing")
        yield send
        self._link.commit(CommitOrder(number, num_tokens, num_blocks, num_chunks, (1,), 0.0), TIMEOUT_S)
        self.whole_s = time.perf_counter() - begin_s

    def close(self) -> None:
        self._link.close()


@contextmanager
def _parties(num_blocks: int, core: int) -> Generator[tuple[dict[str, _Sender], dict[str, Limit], tuple[int, int]]]:
    max_bytes = num_blocks * _BLOCK_BYTES
    command = [sys.executable, "-m", "pdserve_bench.transfer.receiver", str(core), str(num_blocks), str(max_bytes)]
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        if process.stdout is None or process.stdin is None:
            raise RuntimeError("a process without pipes")
        stack.callback(process.stdin.close)
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the receiving process ended with code {process.wait()}")
        there: dict[str, Any] = json.loads(line)
        store = PagedKv(parties.LAYOUT, num_blocks, torch.device("cpu"), shared=True)
        store.pool.view(torch.uint8).random_(256)
        receiver = parties.receiver(there["incarnation"])
        address = f"127.0.0.1:{there['kv_port']}"
        peer = Peer(receiver.worker_id, receiver.incarnation, address, parties.LAYOUT, "")
        assert store.shared_fd is not None
        links: dict[str, Link] = {
            "shm": ShmLink(_source("shm", store), store.shared_fd, peer, 1),
            "grpc": GrpcLink(_source("grpc", store), peer, 1),
        }
        limits: dict[str, Limit] = {
            "shm": ShmLimit(there["shm_address"], max_bytes),
            "grpc": TcpLimit(there["tcp_port"], max_bytes),
        }
        for limit in limits.values():
            stack.callback(limit.close)
        ours = {name: _Sender(link, num_blocks) for name, link in links.items()}
        for sender in ours.values():
            stack.callback(sender.close)
        yield ours, limits, (os.getpid(), process.pid)


def _source(transport: str, store: PagedKv) -> Source:
    """Each its own sender: one sender has one link to a receiver at a time."""
    return Source(parties.sender(transport), parties.FINGERPRINT, store, 1024 * 1024)


def _timed(action: Callable[[], object], pids: Sequence[int]) -> Timed:
    begin_s, begin_cpu_s = time.perf_counter(), _cpu_s(pids)
    action()
    return Timed(time.perf_counter() - begin_s, _cpu_s(pids) - begin_cpu_s)


def _cpu_s(pids: Sequence[int]) -> float:
    """To the nanosecond, unlike /proc: clock_getcpuclockid(3) of Linux."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)
