import asyncio
import random

import pytest

from coordinator.fleet.values import Role, WorkerState
from coordinator.sequences import SequencePhase, SequenceStream
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.sampling import FinishReason
from tests.support.scheduling_rig import failure, first_delta, pair, read_all, request, scheduling_rig
from tests.support.scripted_worker import EOS, MODEL, expected_tokens


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
async def test_delivers_exactly_max_tokens(max_tokens: int) -> None:
    async with scheduling_rig() as rig:
        prefill, decode = await pair(rig)
        tokens, end = await read_all(rig.submit((9, 8), max_tokens))
        assert tokens == expected_tokens((9, 8), max_tokens)
        assert end.finish_reason is FinishReason.LENGTH
        assert end.timings.prefill_worker == "p0"
        assert end.timings.decode_worker == ("d0" if max_tokens > 1 else "")
        timings = end.timings
        assert timings.queue_s + timings.reserve_s + timings.prefill_s == pytest.approx(timings.ttft_s)
        await rig.until_idle()
        assert not prefill.cancels
        assert not decode.cancels
        assert [kind for kind, _ in decode.submits] == (["decode"] if max_tokens > 1 else [])


async def test_first_token_that_ends_the_sequence_frees_decode() -> None:
    async with scheduling_rig() as rig:
        _, decode = await pair(rig)
        tokens, end = await read_all(rig.submit((EOS, 1), max_tokens=5))
        assert tokens == [EOS]
        assert end.finish_reason is FinishReason.STOP
        await rig.until_idle()
        assert len(decode.cancels) == 1


async def test_many_normal_completions_cancel_nothing() -> None:
    async with scheduling_rig() as rig:
        prefill, decode = await pair(rig, num_blocks=64)
        prompts = [(i + 3, 1) for i in range(100)]
        results = await asyncio.gather(*(read_all(rig.submit(prompt, 6)) for prompt in prompts))
        assert [tokens for tokens, _ in results] == [expected_tokens(prompt, 6) for prompt in prompts]
        await rig.until_idle()
        assert not prefill.cancels
        assert not decode.cancels
        assert decode.max_reserved <= 64


async def test_two_requests_with_one_label_are_independent() -> None:
    async with scheduling_rig() as rig:
        await pair(rig)
        one, other = rig.submit((4, 4), 5), rig.submit((5, 5), 5)
        assert one.id != other.id
        assert (await read_all(one))[0] == expected_tokens((4, 4), 5)
        assert (await read_all(other))[0] == expected_tokens((5, 5), 5)


async def test_choices_are_queued_all_or_none() -> None:
    async with scheduling_rig(max_queued_requests=2) as rig:
        _, decode = await pair(rig, num_blocks=4)
        decode.script.decode.clear()
        running = rig.submit((5, 6), 14)  # all four blocks
        assert (await first_delta(running)).token_ids
        with pytest.raises(PdserveError) as caught:
            rig.dispatcher.submit([request((5,), 3)] * 3)
        assert caught.value.reason is ErrorReason.QUEUE_FULL
        assert caught.value.retry_after_s is not None
        assert rig.dispatcher.queues()[MODEL.name].num_requests == 0
        queued = rig.dispatcher.submit([request((5,), 3)] * 2)
        decode.script.decode.set()
        for stream in queued:
            assert (await read_all(stream))[0] == expected_tokens((5,), 3)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
async def test_of_a_burst_exactly_the_surplus_is_refused(seed: int | None) -> None:
    """Whether they come in one instant or while others are being placed."""
    rng = random.Random(seed)
    async with scheduling_rig(max_queued_requests=5) as rig:
        _, decode = await pair(rig, num_blocks=6)
        decode.script.decode.clear()
        accepted: list[SequenceStream] = []
        refused: list[ErrorReason] = []
        for _ in range(5 + 3 + 10):  # three of two blocks each can run
            if seed is not None:
                await asyncio.sleep(rng.random() * 0.003)
            try:
                accepted.append(rig.submit((5, 6, 7), 4))
            except PdserveError as error:
                refused.append(error.reason)
        assert refused == [ErrorReason.QUEUE_FULL] * 10
        decode.script.decode.set()
        for stream in accepted:
            assert (await read_all(stream))[0] == expected_tokens((5, 6, 7), 4)
        assert (await read_all(rig.submit()))[0]
        await rig.until_idle()


async def test_head_waits_for_blocks_and_both_finish() -> None:
    async with scheduling_rig() as rig:
        _, decode = await pair(rig, num_blocks=100)
        decode.script.decode.clear()
        one = rig.submit((1,) * 40, 200)
        other = rig.submit((3,) * 40, 200)  # 60 blocks each
        await rig.until(lambda: decode.num_reserved == 60)
        await rig.until(lambda: rig.dispatcher.num_in_phase(MODEL.name, SequencePhase.RESERVING) == 1)
        assert decode.num_reserved == 60
        decode.script.decode.set()
        results = await asyncio.gather(read_all(one), read_all(other))
        assert [len(tokens) for tokens, _ in results] == [200, 200]
        assert decode.max_reserved == 60
        await rig.until_idle()


async def test_what_fits_together_runs_together() -> None:
    async with scheduling_rig() as rig:
        _, decode = await pair(rig, num_blocks=100)
        decode.script.decode.clear()
        streams = [rig.submit((1,) * 100, 100), rig.submit((3,) * 100, 100)]
        await rig.until(lambda: decode.num_reserved == 100)
        decode.script.decode.set()
        await asyncio.gather(*map(read_all, streams))


async def test_another_decode_worker_with_room_is_tried_before_waiting() -> None:
    async with scheduling_rig() as rig:
        _, small = await pair(rig, num_blocks=100)
        other = await rig.add("d1", "decode", 60)
        small.script.decode.clear()
        other.script.decode.clear()
        streams = [rig.submit((1,) * 40, 200), rig.submit((3,) * 40, 200)]
        await rig.until(lambda: (small.num_reserved, other.num_reserved) == (60, 60))
        small.script.decode.set()
        other.script.decode.set()
        ends = [end for _, end in await asyncio.gather(*map(read_all, streams))]
        assert {end.timings.decode_worker for end in ends} == {"d0", "d1"}


@pytest.mark.parametrize(("prompt", "max_tokens"), [((1,) * 41, 1), ((1,) * 30, 11)])
async def test_one_block_too_many_is_refused_at_admission(prompt: tuple[int, ...], max_tokens: int) -> None:
    async with scheduling_rig() as rig:
        await pair(rig, num_blocks=10)
        with pytest.raises(PdserveError) as caught:
            rig.submit(prompt, max_tokens)
        assert caught.value.reason is ErrorReason.NEVER_FITS
        assert rig.dispatcher.num_in_flight == 0
        fits = rig.submit(prompt[:-1], max_tokens)
        assert len((await read_all(fits))[0]) == max_tokens


async def test_no_workers_and_unknown_model_are_refused() -> None:
    async with scheduling_rig() as rig:
        with pytest.raises(PdserveError) as caught:
            rig.submit()
        assert caught.value.reason is ErrorReason.NO_WORKERS
        assert not rig.dispatcher.is_ready(MODEL.name)
        await pair(rig)
        assert rig.dispatcher.is_ready(MODEL.name)
        assert not rig.dispatcher.is_ready("another")


async def test_expired_in_the_queue_costs_no_prefill() -> None:
    async with scheduling_rig() as rig:
        prefill, decode = await pair(rig, num_blocks=10)
        decode.script.decode.clear()
        running = rig.submit((1,) * 20, 20)
        await first_delta(running)
        assert prefill.num_prefill_tokens == 20
        assert await failure(rig.submit((3,) * 20, 20, deadline_s=0.05)) is ErrorReason.DEADLINE_EXCEEDED
        decode.script.decode.set()
        await rig.until_idle()
        assert prefill.num_prefill_tokens == 20


async def test_prefill_count_drops_with_the_transfer_not_with_the_end() -> None:
    async with scheduling_rig() as rig:
        prefill, decode = await pair(rig)
        decode.script.decode.clear()
        prefill.script.transfer.clear()
        stream = rig.submit()
        await first_delta(stream)
        assert rig.in_flight() == {("p0", Role.PREFILL): 1, ("d0", Role.DECODE): 1}
        assert rig.dispatcher.num_transferring(MODEL.name) == 1
        prefill.script.transfer.set()
        await rig.until(lambda: rig.in_flight() == {("p0", Role.PREFILL): 0, ("d0", Role.DECODE): 1})
        assert rig.dispatcher.num_transferring(MODEL.name) == 0
        stream.cancel()
        await rig.until_idle()


async def test_decode_tokens_may_overtake_the_first() -> None:
    async with scheduling_rig() as rig:
        prefill, decode = await pair(rig)
        prefill.script.first_token.clear()
        stream = rig.submit((5, 6, 7), 6)
        await rig.until(lambda: bool(decode.submits) and decode.idle)
        prefill.script.first_token.set()
        assert (await read_all(stream))[0] == expected_tokens((5, 6, 7), 6)
        await rig.until_idle()
        assert not prefill.cancels


async def test_a_draining_worker_finishes_and_gets_nothing_new() -> None:
    async with scheduling_rig() as rig:
        _, decode = await pair(rig)
        decode.script.decode.clear()
        running = rig.submit((5, 6), 6)
        await first_delta(running)
        drained = asyncio.create_task(decode.drain())
        await rig.until(lambda: rig.state(decode) is WorkerState.DRAINING)
        other = await rig.add("d1", "decode")
        tokens, end = await read_all(rig.submit((7, 8), 6))
        assert (tokens, end.timings.decode_worker) == (expected_tokens((7, 8), 6), "d1")
        assert not drained.done()  # not before the coordinator has everything that it waits for
        decode.script.decode.set()
        assert (await read_all(running, first_index=1))[0] == expected_tokens((5, 6), 6)[1:]
        await drained
        await decode.leave()
        await rig.until(lambda: rig.state(decode) is None)
        assert other.idle


async def test_a_colocated_worker_is_its_own_pair() -> None:
    async with scheduling_rig() as rig:
        await rig.add("c0", "colocated")
        await rig.add("c1", "colocated")
        ends = [end for _, end in await asyncio.gather(*(read_all(rig.submit((5, i), 5)) for i in range(6)))]
        assert all(end.timings.prefill_worker == end.timings.decode_worker for end in ends)
        assert {end.timings.prefill_worker for end in ends} == {"c0", "c1"}
        await rig.until_idle()


async def test_drain_refuses_the_new_and_finishes_the_queued() -> None:
    async with scheduling_rig() as rig:
        _, decode = await pair(rig, num_blocks=4)
        decode.script.decode.clear()
        streams = [rig.submit((5, 6), 14), rig.submit((6, 7), 14)]
        rig.dispatcher.begin_drain()
        with pytest.raises(PdserveError) as caught:
            rig.submit()
        assert caught.value.reason is ErrorReason.DRAINING
        assert not rig.dispatcher.is_ready(MODEL.name)
        assert not await rig.dispatcher.wait_idle(0.05)
        decode.script.decode.set()
        assert [len(tokens) for tokens, _ in await asyncio.gather(*map(read_all, streams))] == [14, 14]
        assert await rig.dispatcher.wait_idle(10.0)


async def test_close_ends_what_is_left_as_draining() -> None:
    async with scheduling_rig() as rig:
        _, decode = await pair(rig, num_blocks=4)
        decode.script.decode.clear()
        streams = [rig.submit((5, 6), 14), rig.submit((6, 7), 14)]
        await first_delta(streams[0])
        await rig.dispatcher.close()
        assert [await failure(stream) for stream in streams] == [ErrorReason.DRAINING] * 2
