"""F01 and F02 in workers over sockets, with a model whose KV gives away any mix-up: groups, aborts and failures."""

import asyncio
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest

from pdserve.engine.sequence import Chunk
from tests.support.bench_fleet import fleet, prompt_of
from tests.support.fake_engine import FakeStore, expected_output
from tests.support.worker_bench import WAIT_S, BenchWorker, Coordinator, bench_settings

BLOCK = 4
TOPOLOGIES = pytest.mark.parametrize("colocated", [False, True], ids=["apart", "colocated"])
PROMPT = prompt_of(19)
SHAREABLE = 16


async def ask(coordinator: Coordinator, number: int, prompt: Seq[int] = PROMPT) -> int:
    """Run a request to its end, which must be right; how many of its prompt's tokens were cached."""
    await coordinator.submit(number, prompt)
    stream = await coordinator.finished(number)
    assert stream.output == expected_output(prompt, 8)
    return stream.num_cached_tokens


class Gate:
    """Called once a step, it stops the engine at the `step`th until told to go on."""

    def __init__(self, step: int) -> None:
        self.step, self.num_steps = step, 0
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, _: Seq[Chunk]) -> None:
        self.num_steps += 1
        if self.num_steps == self.step:
            self.reached.set()
            assert self.go_on.wait(WAIT_S)


def workers(
    colocated: bool, before_run: Callable[[Seq[Chunk]], None] = lambda _: None, store: FakeStore | None = None
) -> tuple[BenchWorker, BenchWorker | None]:
    """One block a step; `before_run` where prompts are computed, `store` where they are decoded."""
    settings = bench_settings(token_budget=BLOCK)
    if colocated:
        return BenchWorker("colocated", settings, before_run=before_run, store=store), None
    return BenchWorker("prefill", settings, before_run=before_run), BenchWorker("decode", settings, store=store)


@TOPOLOGIES
async def test_groups_share_nothing(colocated: bool) -> None:
    """F01: equal names of a salt and an adapter are two things."""
    groups = [("", ""), ("X", ""), ("", "X"), ("X", "X"), ("XX", "")]
    async with fleet(*workers(colocated), colocated=colocated) as coordinator:
        found: list[int] = []
        for number, (salt, adapter) in enumerate(groups * 2, start=1):
            coordinator.cache_salt, coordinator.adapter = salt, adapter
            found.append(await ask(coordinator, number))
        assert found == [0] * len(groups) + [SHAREABLE] * len(groups)


ABORTS = [*((False, step) for step in range(1, 6)), *((True, step) for step in range(1, 8))]


@pytest.mark.parametrize(("colocated", "step"), ABORTS)
async def test_an_abort_leaves_only_what_was_computed(colocated: bool, step: int) -> None:
    """F02: in each chunk of a prompt, and, colocated, while decoding."""
    gate = Gate(step)
    async with fleet(*workers(colocated, gate), colocated=colocated) as coordinator:
        prefill = coordinator.prefill
        await coordinator.submit(1, PROMPT, max_tokens=30)
        assert await asyncio.to_thread(gate.reached.wait, WAIT_S)
        cancelled = [worker.next_cancel() for worker in {prefill, coordinator.decode}]
        coordinator.cancel(1)
        await asyncio.gather(*cancelled)
        gate.go_on.set()
        for worker in {prefill, coordinator.decode}:
            await worker.until_empty()
        computed = prefill.runner.num_tokens
        found = await ask(coordinator, 2)
        assert found <= min(computed, SHAREABLE) // BLOCK * BLOCK
        assert found >= min((step - 1) * BLOCK, SHAREABLE)
        assert await ask(coordinator, 3) == SHAREABLE


@TOPOLOGIES
async def test_a_chunk_that_failed_is_not_kept(colocated: bool) -> None:
    """F02, G01: the third of five chunks raises; the first two are good."""
    num_steps = 0

    def fail_in_the_third(_: Seq[Chunk]) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise ValueError("planted")

    async with fleet(*workers(colocated, fail_in_the_third), colocated=colocated) as coordinator:
        await coordinator.submit(1, PROMPT)
        assert (await coordinator.finished(1)).error is not None
        coordinator.cancel(1)
        for worker in {coordinator.prefill, coordinator.decode}:
            await worker.until_empty()
        assert await ask(coordinator, 2) == 2 * BLOCK


class FailingStore(FakeStore):
    """Every write fails while `failing`; the first one waits for `go_on`."""

    def __init__(self) -> None:
        super().__init__(64, BLOCK)
        self.failing = True
        self.writing, self.go_on = threading.Event(), threading.Event()

    def write_block(self, block_id: int, offset: int, data: bytes | memoryview) -> None:
        self.writing.set()
        assert self.go_on.wait(WAIT_S)
        if self.failing:
            raise OSError("planted")
        super().write_block(block_id, offset, data)


@pytest.mark.parametrize("fault", ["failed", "cancelled"])
async def test_a_transfer_that_does_not_end_well_leaves_nothing_at_decode(fault: str) -> None:
    """F02: the next request gets every block, and the prompt's own worker has kept them."""
    store = FailingStore()
    async with fleet(*workers(False, store=store)) as coordinator:
        decode = coordinator.decode
        await coordinator.submit(1, PROMPT)
        assert await asyncio.to_thread(store.writing.wait, WAIT_S)
        if fault == "cancelled":
            cancelled = decode.next_cancel()
            coordinator.cancel(1)
            await cancelled
            store.failing = False
        store.go_on.set()
        if fault == "failed":
            assert (await coordinator.finished(1)).error is not None
            coordinator.cancel(1)
        for worker in (coordinator.prefill, decode):
            await worker.until_empty()
        store.failing = False
        assert decode.pool.num_cached_blocks == 0
        assert (await coordinator.reserve(2, 27, PROMPT)).granted.num_cached_blocks == 0
        coordinator.cancel(2, prefill=False)
        await ask(coordinator, 3)
        assert (await coordinator.reserve(4, 27, PROMPT)).granted.num_cached_blocks == len(PROMPT) // BLOCK
        coordinator.cancel(4, prefill=False)
        assert await ask(coordinator, 5) == SHAREABLE


@TOPOLOGIES
async def test_blocks_in_use_outlive_every_eviction(colocated: bool) -> None:
    """F02: a long answer goes on from a shared prefix while others push everything else out of a full pool."""
    settings = bench_settings(token_budget=BLOCK)
    first = BenchWorker("colocated" if colocated else "prefill", settings, num_blocks=24)
    decode = None if colocated else BenchWorker("decode", settings, num_blocks=24)
    async with fleet(first, decode, colocated=colocated) as coordinator:
        await ask(coordinator, 1)
        await coordinator.submit(2, PROMPT, max_tokens=40)
        for number in range(3, 20):
            await ask(coordinator, number, prompt_of(19 + number % 5, number))
        stream = await coordinator.finished(2)
        assert stream.output == expected_output(PROMPT, 40)
        assert stream.num_cached_tokens == SHAREABLE
