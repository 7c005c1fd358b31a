import asyncio
import random

import pytest

from coordinator.fleet.values import WorkerState
from coordinator.sequences import SequencePhase, SequenceStream, TokenDelta
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from tests.support.scheduling_rig import failure, first_delta, pair, read_all, scheduling_rig
from tests.support.scripted_worker import DECODE, EOS, MODEL, PREFILL, ScriptedWorker, expected_tokens


@pytest.mark.parametrize("gate", ["reserve", "prefill", "transfer", "decode"])
async def test_deadline_in_any_phase_frees_everything(gate: str) -> None:
    async with scheduling_rig() as rig:
        prefill, decode = await pair(rig)
        for worker in (prefill, decode):
            getattr(worker.script, gate).clear()
        assert await failure(rig.submit(deadline_s=0.3)) is ErrorReason.DEADLINE_EXCEEDED
        decode.script.reserve.set()
        await rig.until_idle()
        assert all(0 < context.deadline_remaining_ms <= 300 for context in prefill.contexts + decode.contexts)


@pytest.mark.parametrize("gate", ["reserve", "prefill", "transfer", "decode"])
async def test_cancel_in_any_phase_frees_everything(gate: str) -> None:
    async with scheduling_rig() as rig:
        prefill, decode = await pair(rig)
        for worker in (prefill, decode):
            getattr(worker.script, gate).clear()
        stream = rig.submit()
        phase = {"reserve": SequencePhase.RESERVING, "prefill": SequencePhase.PREFILL}.get(gate, SequencePhase.DECODE)
        await rig.until(lambda: rig.dispatcher.num_in_phase(MODEL.name, phase) == 1)
        stream.cancel()
        assert await failure(stream) is ErrorReason.CANCELLED
        decode.script.reserve.set()
        await rig.until_idle()
        stream.cancel()


async def test_a_slow_reader_is_ended() -> None:
    async with scheduling_rig(max_unread_tokens=8, unread_grace_s=0.0) as rig:
        await pair(rig)
        stream = rig.submit((5,), 100)
        await rig.until_idle()
        assert await failure(stream) is ErrorReason.SLOW_CONSUMER


@pytest.mark.parametrize("reason", [ErrorReason.TRANSFER_FAILED, ErrorReason.WORKER_LOST])
async def test_a_failure_nobody_noticed_is_tried_again_once_under_a_new_id(reason: ErrorReason) -> None:
    async with scheduling_rig() as rig:
        prefill, _ = await pair(rig)
        prefill.script.prefill_errors.append(PdserveError(reason, "as scripted"))
        assert (await read_all(rig.submit((5, 6), 5)))[0] == expected_tokens((5, 6), 5)
        assert len({sequence_id for _, sequence_id in prefill.submits}) == 2
        prefill.script.prefill_errors.extend(PdserveError(reason, "as scripted") for _ in range(2))
        assert await failure(rig.submit((5, 6), 5)) is reason
        await rig.until_idle()


async def test_an_error_after_the_first_token_reaches_the_client() -> None:
    async with scheduling_rig() as rig:
        _, decode = await pair(rig)
        for reason in (ErrorReason.TRANSFER_FAILED, ErrorReason.NUMERICAL_ERROR):
            decode.script.decode.clear()
            decode.script.decode_errors.append(PdserveError(reason, "as scripted"))
            stream = rig.submit()
            await first_delta(stream)
            decode.script.decode.set()
            with pytest.raises(PdserveError) as caught:
                await read_all(stream, first_index=1)
            assert caught.value.reason is reason
        await rig.until_idle()


async def test_stale_duplicate_and_senseless_outputs_harm_nobody() -> None:
    async with scheduling_rig() as rig:
        prefill, decode = await pair(rig)
        decode.script.decode.clear()
        stream = rig.submit((5, 6), 5)
        await first_delta(stream)
        sequence_id = prefill.submits[0][1]
        unknown = SequenceId(1, 2)
        for role, worker in ((PREFILL, prefill), (DECODE, decode)):
            worker.emit(role, unknown, first_index=3, token_ids=[1])
            worker.emit(role, unknown, transferred=True)
            worker.fail(role, unknown, PdserveError(ErrorReason.INTERNAL, "of nobody"))
        prefill.emit(PREFILL, sequence_id, token_ids=[expected_tokens((5, 6), 1)[0]])
        decode.emit(DECODE, sequence_id, first_index=0, token_ids=[7])
        decode.script.decode.set()
        tokens, _ = await read_all(stream, first_index=1)
        assert tokens == expected_tokens((5, 6), 5)[1:]
        senseless = rig.submit((5, 6), 5)
        decode.script.decode.clear()
        await first_delta(senseless)
        decode.emit(DECODE, decode.submits[-1][1], first_index=5, token_ids=[1])
        assert await failure(senseless) is ErrorReason.INTERNAL
        decode.script.decode.set()
        await rig.until_idle()


@pytest.mark.parametrize("lost", ["p0", "d0"])
async def test_a_lost_worker_fails_or_retries_its_sequences_only(lost: str) -> None:
    async with scheduling_rig() as rig:
        workers = dict(zip(("p0", "d0"), await pair(rig), strict=True))
        workers["p0"].script.transfer.clear()
        noticed = rig.submit((5, 6), 5)
        await first_delta(noticed)
        workers["p0"].script.prefill.clear()
        unnoticed = rig.submit((6, 7), 5)
        await rig.until(lambda: rig.dispatcher.num_in_phase(MODEL.name, SequencePhase.PREFILL) == 1)
        await workers[lost].kill()
        assert await failure(noticed) is ErrorReason.WORKER_LOST
        await rig.add(lost, "prefill" if lost == "p0" else "decode")
        if lost == "d0":
            workers["p0"].script.prefill.set()
            workers["p0"].script.transfer.set()
        assert (await read_all(unnoticed))[0] == expected_tokens((6, 7), 5)
        await rig.until_idle()


async def test_a_stalled_worker_gets_nothing_until_it_moves() -> None:
    async with scheduling_rig(stalled_after_s=0.2) as rig:
        prefill, decode = await pair(rig)
        reporting = asyncio.create_task(keep_reporting([decode]))
        prefill.has_work = True
        stuck = asyncio.create_task(keep_reporting([prefill]))
        await rig.until(lambda: rig.state(prefill) is WorkerState.STALLED)
        assert rig.state(decode) is WorkerState.READY
        assert not rig.dispatcher.is_ready(MODEL.name)
        with pytest.raises(PdserveError) as caught:
            rig.submit()
        assert caught.value.reason is ErrorReason.NO_WORKERS
        prefill.has_work = False
        await rig.until(lambda: rig.dispatcher.is_ready(MODEL.name))
        assert (await read_all(rig.submit()))[0]
        stuck.cancel()
        await rig.until(lambda: rig.state(prefill) is WorkerState.STALLED)
        reporting.cancel()


async def test_a_worker_lost_while_it_is_asked_is_replaced() -> None:
    async with scheduling_rig() as rig:
        _, decode = await pair(rig)
        decode.script.reserve.clear()
        stream = rig.submit((6, 7), 5)
        await rig.until(lambda: decode.num_asked == 1)
        await decode.kill()
        await rig.until(lambda: rig.state(decode) is None)
        await rig.add("d1", "decode")
        tokens, end = await read_all(stream)
        assert (tokens, end.timings.decode_worker) == (expected_tokens((6, 7), 5), "d1")
        await rig.until_idle()


async def test_a_queue_without_workers_gives_up_after_a_while() -> None:
    async with scheduling_rig(stalled_after_s=0.2) as rig:
        prefill, decode = await pair(rig)
        reporting = asyncio.create_task(keep_reporting([prefill, decode]))
        await rig.until(lambda: rig.dispatcher.is_ready(MODEL.name))
        decode.script.reserve.clear()
        stream = rig.submit()
        await rig.until(lambda: decode.num_asked == 1)
        reporting.cancel()
        await decode.kill()
        assert await failure(stream) is ErrorReason.NO_WORKERS


async def test_what_only_a_lost_worker_could_hold_never_fits() -> None:
    async with scheduling_rig() as rig:
        _, large = await pair(rig, num_blocks=100)
        await rig.add("d1", "decode", 10)
        large.script.reserve.clear()
        stream = rig.submit((5,) * 20, 40)
        await rig.until(lambda: large.num_asked == 1)
        await large.kill()
        assert await failure(stream) is ErrorReason.NEVER_FITS


async def keep_reporting(workers: list[ScriptedWorker]) -> None:
    while True:
        for worker in workers:
            worker.report()
        await asyncio.sleep(0.02)


async def test_a_restarted_worker_is_not_flooded() -> None:
    async with scheduling_rig() as rig:
        await rig.add("p0", "prefill")
        decodes = [await rig.add(f"d{i}", "decode", 64) for i in range(3)]
        await decodes[0].kill()
        await rig.until(lambda: rig.state(decodes[0]) is None)
        decodes[0] = await rig.add("d0", "decode", 64)
        ends: list[str] = []
        for _ in range(10):
            batch = await asyncio.gather(*(read_all(rig.submit((5, i), 6)) for i in range(30)))
            ends.extend(end.timings.decode_worker for _, end in batch)
        assert ends.count("d0") <= 0.4 * len(ends)
        await rig.until_idle()


async def consume_and_drop(stream: SequenceStream, rng: random.Random, give_up: asyncio.Event) -> str:
    num_tokens = rng.randrange(12)
    try:
        async for event in stream:
            if isinstance(event, TokenDelta):
                num_tokens -= 1
            if num_tokens < 0 or give_up.is_set():
                stream.cancel()
                return "cancelled"
        return "finished"
    except PdserveError as error:
        return error.reason.value


@pytest.mark.parametrize("seed", [1, 2])
async def test_counts_return_to_zero_after_random_cancels(seed: int) -> None:
    """D03: cancels at random points, some before the first await, with workers of little room."""
    rng = random.Random(seed)
    async with scheduling_rig(max_queued_requests=1000) as rig:
        workers = [await rig.add(f"p{i}", "prefill", 16) for i in range(2)]
        workers += [await rig.add(f"d{i}", "decode", 24) for i in range(2)]
        give_up = asyncio.Event()
        tasks: list[asyncio.Task[str]] = []
        for i in range(500):
            stream = rig.submit((rng.choice((EOS, 3, 4)), i % 50), rng.randint(1, 20))
            tasks.append(asyncio.create_task(consume_and_drop(stream, rng, give_up)))
            if rng.random() < 0.2:
                stream.cancel()
            if rng.random() < 0.3:
                rng.choice(workers).script.prefill_errors.append(PdserveError(ErrorReason.TRANSFER_FAILED, "scripted"))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
        outcomes = await asyncio.gather(*tasks)
        assert len(set(outcomes)) >= 3
        await rig.until_idle()
        assert not any(rig.in_flight().values())
        assert rig.dispatcher.queues()[MODEL.name].num_requests == 0
        assert rig.dispatcher.queues()[MODEL.name].num_tokens == 0


async def test_counts_return_to_zero_when_workers_die_and_come_back() -> None:
    rng = random.Random(3)
    async with scheduling_rig(max_queued_requests=1000) as rig:
        for name in ("p0", "p1"):
            await rig.add(name, "prefill", 16)
        for name in ("d0", "d1"):
            await rig.add(name, "decode", 24)
        tasks: list[asyncio.Task[str]] = []
        for i in range(200):
            stream = rig.submit((3, i % 50), rng.randint(1, 20))
            tasks.append(asyncio.create_task(consume_and_drop(stream, rng, asyncio.Event())))
            if i % 50 == 25:
                name = rng.choice(sorted(rig.workers))
                await rig.workers[name].kill()
                await rig.add(name, "prefill" if name[0] == "p" else "decode", 24)
        outcomes = await asyncio.gather(*tasks)
        assert set(outcomes) <= {"finished", "cancelled", "worker_lost", "transfer_failed"}
        await rig.until_idle()
        assert not any(rig.in_flight().values())
