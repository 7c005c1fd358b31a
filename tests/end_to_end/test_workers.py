"""Prefill, decode and colocated workers over real sockets, with a model whose KV gives away any mix-up."""

import asyncio
import threading
import time
from collections.abc import Sequence as Seq

import pytest

from pdserve.core.errors import ErrorReason
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import FinishReason, SamplingParams
from pdserve.engine.sequence import Chunk
from tests.support.bench_fleet import fleet, prompt_of
from tests.support.fake_engine import FakeStore, expected_output
from tests.support.worker_bench import WAIT_S, BenchWorker, Coordinator, bench_settings, until

BLOCK = 4


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("token_budget", [BLOCK, 6, 4 * BLOCK])
async def test_tokens_are_those_of_one_process_around_every_block_edge(colocated: bool, token_budget: int) -> None:
    """E06: prompts shorter than a block, and exact multiples of it."""
    settings = bench_settings(token_budget=token_budget)
    first = BenchWorker("colocated" if colocated else "prefill", settings)
    decode = None if colocated else BenchWorker("decode", settings)
    async with fleet(first, decode, colocated=colocated) as coordinator:
        for length in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 30):
            prompt = prompt_of(length, length)
            answer = await coordinator.reserve(length, length + 8)
            assert answer.granted.num_blocks == blocks_for_tokens(length + 8, BLOCK)
            await coordinator.submit(length, prompt)
            stream = await coordinator.finished(length)
            assert stream.output == expected_output(prompt, 8)
            assert stream.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("colocated", [False, True])
async def test_many_at_once_equal_each_alone(colocated: bool) -> None:
    async with fleet(colocated=colocated) as coordinator:
        prompts = {number: prompt_of(1 + number % 9, number) for number in range(1, 13)}
        for number, prompt in prompts.items():
            await coordinator.submit(number, prompt, max_tokens=2 + number % 7)
        for number, prompt in prompts.items():
            stream = await coordinator.finished(number)
            assert stream.output == expected_output(prompt, 2 + number % 7)
            assert stream.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
async def test_max_tokens_is_exact_and_one_token_moves_no_kv(colocated: bool, max_tokens: int) -> None:
    """E05."""
    async with fleet(colocated=colocated) as coordinator:
        prompt = prompt_of(6)
        await coordinator.submit(1, prompt, max_tokens=max_tokens)
        stream = await coordinator.finished(1)
        assert stream.output == expected_output(prompt, max_tokens)
        assert stream.finish_reason is FinishReason.LENGTH
        if max_tokens == 1:
            assert not stream.transferred
            assert coordinator.decode.runner.num_tokens in (0, 6)  # 6: colocated


@pytest.mark.parametrize("colocated", [False, True])
async def test_a_first_token_that_stops_aborts_the_transfer(colocated: bool) -> None:
    """E05: the coordinator cancels the decode half; nothing stays reserved."""
    async with fleet(colocated=colocated) as coordinator:
        prompt = prompt_of(6)
        await coordinator.submit(1, prompt, stop_token_ids=frozenset(expected_output(prompt, 1)))
        stream = await coordinator.finished(1)
        assert stream.output == expected_output(prompt, 1)
        assert stream.finish_reason is FinishReason.STOP
        coordinator.cancel(1, prefill=False)


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("step", [1, 2, 3, 5, 8])
async def test_a_cancel_at_any_step_frees_everything_and_computes_no_more(colocated: bool, step: int) -> None:
    """D01: between prefill chunks and while decoding."""
    reached, go = threading.Event(), threading.Event()
    steps = 0

    def stop_at_step(_: Seq[Chunk]) -> None:
        nonlocal steps
        steps += 1
        if steps == step:
            reached.set()
            assert go.wait(WAIT_S)

    settings = bench_settings(token_budget=4)
    if colocated:
        first, decode = BenchWorker("colocated", settings, before_run=stop_at_step), None
    else:
        first = BenchWorker("prefill", settings, before_run=stop_at_step)
        decode = BenchWorker("decode", settings, before_run=stop_at_step)
    async with fleet(first, decode, colocated=colocated) as coordinator:
        await coordinator.submit(1, prompt_of(14), max_tokens=30)
        assert await asyncio.to_thread(reached.wait, WAIT_S)
        workers = {coordinator.prefill, coordinator.decode}
        cancels = [worker.next_cancel() for worker in workers]
        coordinator.cancel(1)
        await asyncio.gather(*cancels)
        go.set()
        for worker in workers:
            await worker.until_empty()
        assert steps <= step + 1  # the prefill's transfer may just have brought the decode worker its first step


async def test_blocks_under_a_writer_are_not_given_away() -> None:
    """E01: A is aborted while its write is under way; B must not get A's blocks before the writer has left."""
    writing, go_on = threading.Event(), threading.Event()

    class SlowStore(FakeStore):
        def write_block(self, block_id: int, offset: int, data: bytes | memoryview) -> None:
            if not writing.is_set():
                writing.set()
                assert go_on.wait(WAIT_S)
            super().write_block(block_id, offset, data)

    settings = bench_settings()
    decode = BenchWorker("decode", settings, store=SlowStore(4, BLOCK))
    async with fleet(BenchWorker("prefill", settings), decode) as coordinator:
        await coordinator.submit(1, prompt_of(8, 1), max_tokens=8)  # the whole pool of four blocks
        assert await asyncio.to_thread(writing.wait, WAIT_S)
        cancelled = decode.next_cancel()
        coordinator.cancel(1)
        await cancelled
        denied = await coordinator.reserve(2, 16)
        assert denied.HasField("denied")  # A's blocks are still under the writer
        go_on.set()
        await decode.until_empty()
        await coordinator.submit(3, prompt_of(7, 2), max_tokens=8)
        stream = await coordinator.finished(3)
        assert stream.output == expected_output(prompt_of(7, 2), 8)


async def test_a_failing_chunk_is_an_error_and_never_tokens() -> None:
    """E09: the worker raises in chunk 2 of a prompt."""
    calls = 0

    def fail_second(_: Seq[Chunk]) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("planted")

    prefill = BenchWorker("prefill", bench_settings(token_budget=4), before_run=fail_second)
    async with fleet(prefill) as coordinator:
        await coordinator.submit(1, prompt_of(14))
        stream = await coordinator.finished(1)
        assert stream.error is not None
        assert stream.error.reason is ErrorReason.INTERNAL
        assert stream.tokens == {}
        coordinator.cancel(1, prefill=False)
        await coordinator.decode.until_empty()
        assert coordinator.decode.runner.num_tokens == 0
        await coordinator.submit(2, prompt_of(14))
        assert (await coordinator.finished(2)).output == expected_output(prompt_of(14), 8)


async def test_a_transfer_that_cannot_start_is_an_error_and_never_tokens() -> None:
    """E09: nobody listens at the decode worker's KV address."""
    async with fleet() as coordinator:
        prompt, params = prompt_of(6), SamplingParams(max_tokens=8, temperature=0.0)
        granted = (await coordinator.reserve(1, 14)).granted
        coordinator.submit_decode(1, prompt, params, granted.reservation_id)
        target = coordinator.target(granted.reservation_id, kv_address="127.0.0.1:9")
        coordinator.submit_prefill(1, prompt, params, target)
        await coordinator.until(lambda: coordinator.streams[1].error is not None)
        assert coordinator.streams[1].error.reason is ErrorReason.TRANSFER_FAILED  # type: ignore[union-attr]
        assert coordinator.decode.runner.num_tokens == 0
        coordinator.cancel(1)


async def test_an_old_incarnation_and_a_wrong_reservation_are_refused() -> None:
    """E08: messages meant for an earlier life of the decode worker."""
    async with fleet() as coordinator:
        prompt, params = prompt_of(6), SamplingParams(max_tokens=8, temperature=0.0)
        granted = (await coordinator.reserve(1, 14)).granted
        coordinator.submit_decode(1, prompt, params, granted.reservation_id)
        stale = coordinator.target(granted.reservation_id)
        stale.worker.incarnation += 1
        coordinator.submit_prefill(1, prompt, params, stale)
        await coordinator.until(lambda: coordinator.streams[1].error is not None)
        coordinator.submit_prefill(2, prompt, params, coordinator.target(granted.reservation_id + 100))
        await coordinator.until(lambda: coordinator.streams[2].error is not None)
        coordinator.submit_decode(3, prompt, params, 12345)
        await coordinator.until(lambda: coordinator.streams[3].error is not None)
        assert coordinator.streams[3].error.reason is ErrorReason.STALE  # type: ignore[union-attr]
        coordinator.cancel(1)


async def test_reservations_bound_what_runs_together() -> None:
    """E03 on one worker: two that do not fit wait for each other; an early stop gives back the whole reservation."""
    async with fleet(decode=BenchWorker("decode", num_blocks=10)) as coordinator:
        assert (await coordinator.reserve(1, 24)).granted.num_blocks == 6
        denied = (await coordinator.reserve(2, 24)).denied
        assert (denied.needed, denied.free, denied.never_fits) == (6, 4, False)
        assert (await coordinator.reserve(3, 44)).denied.never_fits
        await coordinator.submit(1, prompt_of(4), max_tokens=20)
        await coordinator.finished(1)
        await coordinator.decode.until_empty()
        assert coordinator.decode.ledger.version > denied.ledger_version
        await coordinator.submit(2, prompt_of(4), max_tokens=20)
        assert len((await coordinator.finished(2)).output) == 20


async def test_a_prompt_larger_than_the_prefill_pool_is_refused_and_the_next_runs() -> None:
    """I02 on a prefill worker."""
    async with fleet(BenchWorker("prefill", num_blocks=4)) as coordinator:
        await coordinator.submit(1, prompt_of(17))
        assert (await coordinator.finished(1)).error.reason is ErrorReason.NEVER_FITS  # type: ignore[union-attr]
        coordinator.cancel(1, prefill=False)
        await coordinator.submit(2, prompt_of(16))
        assert (await coordinator.finished(2)).output == expected_output(prompt_of(16), 8)


async def test_a_coordinator_that_vanishes_leaves_nothing_behind() -> None:
    async with fleet() as coordinator:
        await coordinator.submit(1, prompt_of(14), max_tokens=200)
        await coordinator.reserve(2, 8)
        await coordinator.until(lambda: len(coordinator.streams[1].tokens) > 2)
        await coordinator.close()


async def test_a_reservation_that_nobody_renews_is_reaped() -> None:
    decode = BenchWorker("decode", bench_settings(lease_s=0.01))
    async with fleet(decode=decode) as coordinator:
        await coordinator.reserve(1, 8)
        service = decode.worker.services[0]
        (reservation,) = decode.ledger.of_coordinator(coordinator.incarnation)
        service.reap(reservation.lease_end_s - 0.001)
        assert decode.ledger.num_reserved_blocks == 2
        service.reap(reservation.lease_end_s)


async def test_duplicate_and_late_messages_change_nothing() -> None:
    """E02: any message may come again, or after the end."""
    async with fleet() as coordinator:
        prompt = prompt_of(6)
        await coordinator.submit(1, prompt)
        await coordinator.submit(1, prompt)
        stream = await coordinator.finished(1)
        assert stream.output == expected_output(prompt, 8)
        await coordinator.decode.until_empty()
        for _ in range(3):
            coordinator.cancel(1)
        params = SamplingParams(max_tokens=8, temperature=0.0)
        coordinator.submit_decode(1, prompt, params, 1)
        await coordinator.until(lambda: stream.error is not None)
        await coordinator.submit(2, prompt)
        assert (await coordinator.finished(2)).output == expected_output(prompt, 8)
        assert coordinator.decode.worker.services[0].load().totals.stale_events > 0


@pytest.mark.parametrize("colocated", [False, True])
async def test_senseless_submits_are_refused_and_cost_their_neighbours_nothing(colocated: bool) -> None:
    """C02, B03 at the worker's own door: nothing may reach the forward pass that could fail it for others."""
    async with fleet(colocated=colocated) as coordinator:
        good, params = prompt_of(9), SamplingParams(max_tokens=8, temperature=0.0)
        await coordinator.submit(1, good, max_tokens=30)
        senseless = [
            ([], params, {}),
            ([97], params, {}),
            ([2**32 - 1], params, {}),
            (good, SamplingParams(max_tokens=0), {}),
            (good, SamplingParams(max_tokens=5000), {}),
            (good, SamplingParams(max_tokens=8, stop_token_ids=frozenset({97})), {}),
            (good, SamplingParams(max_tokens=8, logit_bias={97: 1.0}), {}),
            (good, SamplingParams(max_tokens=8, min_p=2.0), {}),
            (good, SamplingParams(max_tokens=8, top_p=0.0), {}),
            (good, SamplingParams(max_tokens=8, temperature=float("nan")), {}),
            (good, SamplingParams(max_tokens=8, presence_penalty=float("inf")), {}),
            (good, params, {"num_cached_blocks": 100}),
            (good, params, {"transport": "pigeon"}),
        ]
        for number, (prompt, sampling, changes) in enumerate(senseless, start=10):
            granted = (await coordinator.reserve(number, 24)).granted
            target = coordinator.target(granted.reservation_id, **changes)
            coordinator.submit_prefill(number, prompt, sampling, target)
            assert (await coordinator.finished(number)).error is not None, number
            coordinator.cancel(number, prefill=False)
        granted = (await coordinator.reserve(30, 8)).granted
        coordinator.submit_decode(30, good, params, granted.reservation_id)  # 17 tokens where 8 are reserved
        assert (await coordinator.finished(30)).error is not None
        coordinator.submit_prefill(30, good, params, coordinator.target(granted.reservation_id))
        await coordinator.until(lambda: len(coordinator.streams[30].tokens) > 0 or colocated)
        coordinator.cancel(30)
        assert (await coordinator.finished(1)).output == expected_output(good, 30)


async def test_kv_that_is_handed_over_in_the_step_that_forgot_its_sequence_is_given_back() -> None:
    """A deadline expires the decode half in the very step whose prefill half completes."""
    stepping, go = threading.Event(), threading.Event()

    def hold_first(_: Seq[Chunk]) -> None:
        if not stepping.is_set():
            stepping.set()
            assert go.wait(WAIT_S)

    worker = BenchWorker("colocated", bench_settings(token_budget=8), before_run=hold_first)
    async with fleet(worker, colocated=True) as coordinator:
        prompt, params = prompt_of(14), SamplingParams(max_tokens=8, temperature=0.0)
        granted = (await coordinator.reserve(1, 22)).granted
        coordinator.submit_prefill(1, prompt, params, coordinator.target(granted.reservation_id))
        assert await asyncio.to_thread(stepping.wait, WAIT_S)
        coordinator.submit_decode(1, prompt, params, granted.reservation_id, deadline_s=0.0)
        await until(lambda: worker.worker.engine.has_commands)
        go.set()
        await coordinator.until(lambda: coordinator.streams[1].error is not None)


async def test_a_remote_prompt_waiting_on_a_colocated_worker_gets_blocks_that_decode_gave_back() -> None:
    colocated, decode = await BenchWorker("colocated", num_blocks=16).start(), await BenchWorker("decode").start()
    local, remote = Coordinator(colocated, colocated), Coordinator(colocated, decode, incarnation=8)
    try:
        await local.connected()
        await local.reserve(100, 60)  # 15 of 16 blocks
        await remote.submit(1, prompt_of(19))
        await until(lambda: colocated.worker.services[1].num_requests == 1)
        local.cancel(100)
        assert (await remote.finished(1)).output == expected_output(prompt_of(19), 8)
        for worker in (colocated, decode):
            await worker.until_empty()
    finally:
        await local.close()
        await remote.close()
        await colocated.stop()
        await decode.stop()


async def test_a_stream_opened_anew_gives_up_what_the_old_one_held() -> None:
    """No heartbeat of the new stream may keep alive what its coordinator has forgotten."""
    async with fleet() as coordinator:
        await coordinator.reserve(1, 40)
        again = Coordinator(coordinator.prefill, coordinator.decode)
        await coordinator.decode.until_empty()
        await again.submit(2, prompt_of(6))
        assert (await again.finished(2)).output == expected_output(prompt_of(6), 8)
        await again.close()


async def test_a_refused_decode_submit_gives_its_reservation_back() -> None:
    async with fleet() as coordinator:
        for number, params in ((1, SamplingParams(max_tokens=100)), (2, SamplingParams(max_tokens=0))):
            granted = (await coordinator.reserve(number, 8)).granted
            coordinator.submit_decode(number, prompt_of(3), params, granted.reservation_id)
            assert (await coordinator.finished(number)).error is not None
        await coordinator.decode.until_empty()


async def test_deadlines_hold_while_a_prompt_waits_for_room_and_while_a_reservation_waits_for_kv() -> None:
    """I01 on the workers themselves: whatever becomes of the coordinator's own cancel."""
    stepping, go = threading.Event(), threading.Event()

    def hold(_: Seq[Chunk]) -> None:
        stepping.set()
        assert go.wait(WAIT_S)

    prefill = BenchWorker("prefill", num_blocks=4, before_run=hold)
    async with fleet(prefill) as coordinator:
        await coordinator.submit(1, prompt_of(13))
        assert await asyncio.to_thread(stepping.wait, WAIT_S)
        params = SamplingParams(max_tokens=8, temperature=0.0)
        granted = (await coordinator.reserve(2, 21)).granted
        target = coordinator.target(granted.reservation_id)
        coordinator.submit_decode(2, prompt_of(13), params, granted.reservation_id)
        coordinator.submit_prefill(2, prompt_of(13), params, target, deadline_s=30.0)
        await until(lambda: prefill.worker.services[0].num_requests == 2)
        prefill.worker.services[0].reap(time.monotonic() + 31.0)
        await coordinator.until(lambda: coordinator.streams[2].error is not None)
        assert coordinator.streams[2].error.reason is ErrorReason.DEADLINE_EXCEEDED  # type: ignore[union-attr]
        assert prefill.runner.num_tokens == 0
        coordinator.decode.worker.services[0].reap(time.monotonic() + 61.0)
        await coordinator.decode.until_empty()
        go.set()
        coordinator.cancel(1)


async def test_a_lease_that_lapses_is_told_to_a_coordinator_that_still_listens() -> None:
    """Its stream would wait for tokens until its deadline."""
    decode = BenchWorker("decode", bench_settings(lease_s=5.0))
    async with fleet(decode=decode) as coordinator:
        await coordinator.reserve(1, 40)
        decode.worker.services[0].reap(time.monotonic() + 6.0)
        stream = await coordinator.finished(1)
        assert stream.error is not None
        assert stream.error.reason is ErrorReason.WORKER_LOST


async def test_a_replaced_stream_ends() -> None:
    """Else its owner would go on sending into a stream whose outputs go elsewhere."""
    async with fleet() as coordinator:
        await coordinator.reserve(1, 40)
        again = Coordinator(coordinator.prefill, coordinator.decode)
        await asyncio.wait_for(asyncio.gather(*(call.code() for call in coordinator.calls)), WAIT_S)
        await again.close()
