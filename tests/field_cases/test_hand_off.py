"""E01, E09, E11 and I01 in real prefill and decode workers over sockets, with faults planted in stores and forwards."""

import asyncio
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest

from pdserve.core.errors import ErrorReason
from pdserve.core.sampling import FinishReason, SamplingParams
from pdserve.engine.sequence import Chunk
from tests.support.bench_fleet import fleet, prompt_of
from tests.support.fake_engine import FakeStore, expected_output
from tests.support.worker_bench import WAIT_S, BenchWorker, bench_settings

BLOCK = 4


class FaultyStore(FakeStore):
    """Runs `before_read` and `before_write` inside the call, where a test may block or fail."""

    def __init__(self, num_blocks: int = 64) -> None:
        super().__init__(num_blocks, BLOCK)
        self.before_read: Callable[[], None] = lambda: None
        self.before_write: Callable[[], None] = lambda: None

    def read_block(self, block_id: int) -> memoryview:
        self.before_read()
        return super().read_block(block_id)

    def write_block(self, block_id: int, offset: int, data: bytes | memoryview) -> None:
        self.before_write()
        super().write_block(block_id, offset, data)


class Stopper:
    """Blocks its first caller until told to go on."""

    def __init__(self) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        if not self.inside.is_set():
            self.inside.set()
            assert self.go_on.wait(WAIT_S)


async def test_source_blocks_are_not_given_away_while_the_transfer_reads_them() -> None:
    """E01 on the prefill side: A is cancelled while its blocks are being read; B needs those very blocks."""
    store, stopper = FaultyStore(4), Stopper()
    store.before_read = stopper
    prefill = BenchWorker("prefill", store=store)
    async with fleet(prefill) as coordinator:
        await coordinator.submit(1, prompt_of(16, 1))
        assert await asyncio.to_thread(stopper.inside.wait, WAIT_S)
        cancelled = prefill.next_cancel()
        coordinator.cancel(1)
        await cancelled
        await coordinator.submit(2, prompt_of(16, 2))
        await until_waiting(prefill, 1)
        assert prefill.pool.num_free_blocks == 0
        stopper.go_on.set()
        assert (await coordinator.finished(2)).output == expected_output(prompt_of(16, 2), 8)


async def until_waiting(worker: BenchWorker, num_requests: int) -> None:
    """That many requests wait for room at a prefill worker."""
    async with asyncio.timeout(WAIT_S):
        while worker.worker.services[0].load().num_waiting != num_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_a_lease_that_ends_under_a_writer_frees_its_blocks_only_after_it() -> None:
    """E01: on a timeout too, the pages stay with the writer until it has left."""
    store, stopper = FaultyStore(4), Stopper()
    store.before_write = stopper
    decode = BenchWorker("decode", bench_settings(transfer_lease_s=0.05), store=store)
    async with fleet(decode=decode) as coordinator:
        await coordinator.submit(1, prompt_of(8), max_tokens=8)
        assert await asyncio.to_thread(stopper.inside.wait, WAIT_S)
        await asyncio.sleep(0.2)  # four leases
        assert decode.pool.num_free_blocks == 2
        assert (await coordinator.reserve(2, 16)).HasField("denied")
        stopper.go_on.set()
        stream = await coordinator.finished(1)
        if stream.error is None:
            assert stream.output == expected_output(prompt_of(8), 8)
        else:
            assert stream.error.reason in (ErrorReason.TRANSFER_FAILED, ErrorReason.STALE)
        coordinator.cancel(1)


class FailingWrites:
    """Raises at the writes of these numbers, counted from 1."""

    def __init__(self, failing: Callable[[int], bool]) -> None:
        self.failing, self.count = failing, 0

    def __call__(self) -> None:
        self.count += 1
        if self.failing(self.count):
            raise OSError("planted")


@pytest.mark.parametrize("keeps_failing", [False, True])
async def test_a_failed_third_of_five_groups_gives_the_right_tokens_or_an_error(keeps_failing: bool) -> None:
    """E09: a group is sent after each chunk of one block."""
    store = FaultyStore()
    store.before_write = FailingWrites(lambda n: n >= 3 if keeps_failing else n == 3)
    settings = bench_settings(token_budget=BLOCK)
    decode = BenchWorker("decode", settings, store=store)
    async with fleet(BenchWorker("prefill", settings), decode) as coordinator:
        prompt = prompt_of(5 * BLOCK)
        stream = await coordinator.submit(1, prompt)
        if not keeps_failing:
            assert (await coordinator.finished(1)).output == expected_output(prompt, 8)
            assert store.before_write.count == 8  # two came, the third failed, and then all five again
        else:
            await coordinator.until(lambda: stream.error is not None)
            assert stream.error is not None
            assert stream.error.reason is ErrorReason.TRANSFER_FAILED
            assert stream.finish_reason is FinishReason.ERROR
            assert len(stream.tokens) <= 1  # prefill's own
            assert decode.runner.num_tokens == 0
            coordinator.cancel(1)
            await decode.until_empty()
            store.before_write = lambda: None
            await coordinator.submit(2, prompt)
            assert (await coordinator.finished(2)).output == expected_output(prompt, 8)


@pytest.mark.parametrize("chunk", [64, 256])
async def test_slow_forwards_never_ship_a_chunk_before_it_is_written(chunk: int) -> None:
    """E11: 20 long prompts that differ in one early token; a sender that ran ahead would ship what was there before."""

    def slow(chunks: Seq[Chunk]) -> None:
        time.sleep(0.004)  # long enough for a hasty sender to read the pages that this forward is about to write

    settings = bench_settings(token_budget=chunk)
    prefill = BenchWorker("prefill", settings, num_blocks=400, before_run=slow)
    async with fleet(prefill, BenchWorker("decode", settings, num_blocks=400)) as coordinator:
        base = prompt_of(700)
        for number in range(1, 21):
            prompt = [*base]
            prompt[37 * number % 640] = number  # a key in a chunk that is not the last
            await coordinator.submit(number, prompt, max_tokens=3)
            assert (await coordinator.finished(number)).output == expected_output(prompt, 3)
            await coordinator.decode.until_empty()


async def test_answers_are_as_good_after_450_requests_as_at_first() -> None:
    """E11: a fixed set of 50 prompts, asked ten times over."""
    settings = bench_settings(token_budget=16)
    async with fleet(BenchWorker("prefill", settings), BenchWorker("decode", settings)) as coordinator:
        prompts = [prompt_of(1 + number % 40, number) for number in range(50)]
        rounds: list[list[list[int]]] = []
        for round_number in range(10):
            numbers = [1 + 50 * round_number + i for i in range(50)]
            rounds.append([])
            for number, prompt in zip(numbers, prompts, strict=True):
                await coordinator.submit(number, prompt, max_tokens=3)
                rounds[-1].append((await coordinator.finished(number)).output)
        assert rounds[0] == [expected_output(prompt, 3) for prompt in prompts]
        assert rounds[9] == rounds[0]


async def test_a_prompt_that_expires_in_the_prefill_queue_computes_nothing() -> None:
    """I01: it waits for blocks that another prompt's transfer holds."""
    store, stopper = FaultyStore(4), Stopper()
    store.before_read = stopper
    prefill = BenchWorker("prefill", store=store)
    async with fleet(prefill) as coordinator:
        await coordinator.submit(1, prompt_of(16, 1))
        assert await asyncio.to_thread(stopper.inside.wait, WAIT_S)
        computed = prefill.runner.num_tokens
        params = SamplingParams(max_tokens=1, temperature=0.0)
        coordinator.submit_prefill(2, prompt_of(16, 2), params, None, deadline_s=0.02)
        await until_waiting(prefill, 1)
        await asyncio.sleep(0.05)
        stopper.go_on.set()
        stream = await coordinator.finished(2)
        assert stream.error is not None
        assert stream.error.reason is ErrorReason.DEADLINE_EXCEEDED
        assert stream.tokens == {}
        assert prefill.runner.num_tokens == computed
        assert (await coordinator.finished(1)).output == expected_output(prompt_of(16, 1), 8)
