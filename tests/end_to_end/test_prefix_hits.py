"""The prefix cache in real workers over sockets, with a model whose KV gives away any mix-up: F01 to F04."""

import asyncio
import itertools
import random

import pytest

from pdserve.core.sampling import SamplingParams
from pdserve.serving.load import WorkerTotals
from tests.support.bench_fleet import fleet, prompt_of
from tests.support.fake_engine import expected_output
from tests.support.worker_bench import BenchWorker, Coordinator, bench_settings

BLOCK = 4
TOPOLOGIES = pytest.mark.parametrize("colocated", [False, True], ids=["apart", "colocated"])


def totals(worker: BenchWorker) -> WorkerTotals:
    return sum((service.load().totals for service in worker.worker.services), WorkerTotals())


async def ask(coordinator: Coordinator, number: int, prompt: list[int], max_tokens: int = 8) -> int:
    """The prompt's cached tokens; the output is checked, and everything is given back before it returns."""
    await coordinator.submit(number, prompt, max_tokens=max_tokens)
    stream = await coordinator.finished(number)
    assert stream.output == expected_output(prompt, max_tokens)
    await coordinator.prefill.until_empty()
    await coordinator.decode.until_empty()
    return stream.num_cached_tokens


@TOPOLOGIES
@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1])
async def test_a_warm_prompt_is_computed_from_its_last_token_at_least(colocated: bool, length: int) -> None:
    """F04: all of it may be cached, and still one token is computed."""
    async with fleet(colocated=colocated) as coordinator:
        prompt = prompt_of(length)
        assert [await ask(coordinator, number, prompt) for number in (1, 2)] == [0, (length - 1) // BLOCK * BLOCK]


async def test_only_what_the_decode_worker_lacks_is_sent() -> None:
    async with fleet() as coordinator:
        sent = [0]
        block_bytes = coordinator.decode.store.layout.block_bytes
        for number, prompt in enumerate((prompt_of(10), prompt_of(10), prompt_of(12), prompt_of(12), prompt_of(8)), 1):
            await ask(coordinator, number, prompt, max_tokens=2)
            sent.append(totals(coordinator.prefill).transferred_bytes // block_bytes)
        assert [after - before for before, after in itertools.pairwise(sent)] == [3, 1, 1, 0, 0]
        assert totals(coordinator.prefill).transfers_completed == 5
        decode = totals(coordinator.decode)
        assert (decode.prefix_queries, decode.prefix_hits) == (52, 8 + 8 + 12 + 8)


@TOPOLOGIES
async def test_the_next_turn_of_a_conversation_finds_the_answer_too(colocated: bool) -> None:
    """What decode computed is in its pool: 8 + 9 tokens, of which 16 have KV. A prefill pool knows only prompts."""
    async with fleet(colocated=colocated) as coordinator:
        prompt = prompt_of(8)
        await ask(coordinator, 1, prompt, max_tokens=9)
        turn = [*prompt, *expected_output(prompt, 9), 5, 6]
        answer = await coordinator.reserve(7, 30, turn)
        assert answer.granted.num_cached_blocks == 4
        coordinator.cancel(7)
        await coordinator.decode.until_empty()
        assert await ask(coordinator, 2, turn) == (16 if colocated else 8)


@TOPOLOGIES
async def test_only_requests_of_one_salt_and_adapter_share(colocated: bool) -> None:
    """F01."""
    async with fleet(colocated=colocated) as coordinator:
        groups = [("", ""), ("X", ""), ("", "X"), ("X", "X")]
        hits: list[int] = []
        for number, (coordinator.adapter, coordinator.cache_salt) in enumerate([*groups, *groups]):
            hits.append(await ask(coordinator, number, prompt_of(9)))
        assert hits == [0] * 4 + [8] * 4


@TOPOLOGIES
async def test_workers_without_a_cache_answer_as_ever(colocated: bool) -> None:
    settings = bench_settings(prefix_cache=False)
    first = BenchWorker("colocated" if colocated else "prefill", settings)
    async with fleet(first, BenchWorker("decode", settings), colocated=colocated) as coordinator:
        for number in (1, 2):
            assert await ask(coordinator, number, prompt_of(9)) == 0
            assert coordinator.decode.pool.num_cached_blocks == 0
        assert (await coordinator.reserve(3, 20, prompt_of(9))).granted.num_cached_blocks == 0
        coordinator.cancel(3)


async def test_a_pool_may_have_what_the_other_has_not() -> None:
    """Caches come and go by themselves: prefill may be cold where decode is warm, and the other way round."""
    decode = BenchWorker("decode", num_blocks=5)
    async with fleet(decode=decode) as coordinator:
        prompt = prompt_of(9)
        await ask(coordinator, 1, prompt)
        await ask(coordinator, 2, prompt_of(9, 3), max_tokens=10)  # evicts the first from decode's pool
        assert (await coordinator.reserve(7, 17, prompt)).granted.num_cached_blocks == 0
        coordinator.cancel(7)
        await decode.until_empty()
        assert await ask(coordinator, 3, prompt) == 8
    async with fleet(BenchWorker("prefill", num_blocks=3)) as coordinator:
        await ask(coordinator, 1, prompt)
        await ask(coordinator, 2, prompt_of(9, 3))
        assert (await coordinator.reserve(7, 17, prompt)).granted.num_cached_blocks == 2
        coordinator.cancel(7)
        assert await ask(coordinator, 3, prompt) == 0


@TOPOLOGIES
async def test_prompt_logprobs_compute_everything_under_one_reservation(colocated: bool) -> None:
    """In a pool that holds the request once: what was pinned for it does not come on top."""
    size = {"num_blocks": 5}
    first = BenchWorker("colocated" if colocated else "prefill", **size)
    async with fleet(first, BenchWorker("decode", **size), colocated=colocated) as coordinator:
        prompt = prompt_of(12)
        await ask(coordinator, 1, prompt)
        stream = await coordinator.submit(2, prompt, num_prompt_logprobs=0)
        await coordinator.finished(2)
        assert stream.output == expected_output(prompt, 8)
        assert (stream.num_cached_tokens, len(stream.prompt_logprobs)) == (0, 11)


@TOPOLOGIES
async def test_pins_end_with_their_reservation_however_it_ends(colocated: bool) -> None:
    worker = BenchWorker("colocated" if colocated else "decode", bench_settings(lease_s=0.01))
    pair = (worker, None) if colocated else (None, worker)
    async with fleet(*pair, colocated=colocated) as coordinator:
        prompt = prompt_of(9)
        await ask(coordinator, 1, prompt)

        async def reserve(number: int) -> int:
            granted = (await coordinator.reserve(number, 17, prompt)).granted
            assert (
                granted.num_cached_blocks == (await coordinator.reserve(number, 17, prompt)).granted.num_cached_blocks
            )
            assert worker.pool.num_free_blocks == worker.pool.num_blocks - 2
            return granted.reservation_id

        await reserve(2)
        coordinator.cancel(2)
        await worker.until_empty()
        await reserve(3)
        worker.worker.services[0].reap(float("inf"))
        await worker.until_empty()
        params = SamplingParams(max_tokens=8, temperature=0.0)
        coordinator.submit_decode(4, prompt, params, await reserve(4))
        coordinator.cancel(4)
        await worker.until_empty()
        reservation_id = await reserve(5)
        coordinator.submit_prefill(5, prompt, params, coordinator.target(reservation_id, num_cached_blocks=2))
        await coordinator.until(lambda: coordinator.streams[5].transferred)
        coordinator.cancel(5)
        await worker.until_empty()
        await reserve(6)
        await coordinator.close()


@TOPOLOGIES
async def test_prompts_that_share_come_and_go_in_a_full_pool_and_every_token_is_right(colocated: bool) -> None:
    """F02: nothing fails for want of blocks, whatever is shared, evicted or cancelled."""
    rng, size = random.Random(5), {"num_blocks": 16}
    first = BenchWorker("colocated" if colocated else "prefill", **size)
    async with fleet(first, BenchWorker("decode", **size), colocated=colocated) as coordinator:
        params = SamplingParams(max_tokens=8, temperature=0.0)

        async def live(number: int) -> None:
            prompt = [*prompt_of(rng.choice([4, 8, 12]), rng.randrange(2)), *prompt_of(rng.randrange(1, 9), number % 3)]
            room = len(prompt) + 8
            while not (answer := await coordinator.reserve(number, room, prompt)).HasField("granted"):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            granted = answer.granted
            target = coordinator.target(granted.reservation_id, num_cached_blocks=granted.num_cached_blocks)
            coordinator.submit_decode(number, prompt, params, granted.reservation_id)
            coordinator.submit_prefill(number, prompt, params, target)
            if number % 5 == 0:
                await asyncio.sleep(rng.random() * 0.01)
                coordinator.cancel(number)
                return
            stream = await coordinator.finished(number)
            assert stream.error is None, (number, stream.error)
            await coordinator.until(lambda: len(stream.tokens) == 8)
            assert stream.output == expected_output(prompt, 8), number

        async with asyncio.TaskGroup() as tasks:
            for number in range(1, 81):
                tasks.create_task(live(number))
        assert totals(coordinator.prefill).prefix_hits > 100
