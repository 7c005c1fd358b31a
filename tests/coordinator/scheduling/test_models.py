"""Several models behind one dispatcher: pools, queues and bounds of their own."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.sequences import SequencePhase
from pdserve.client.wire import model_info_to_proto
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_info import ModelInfo
from tests.support.scheduling_rig import Rig, first_delta, read_all, request, scheduling_rig
from tests.support.scripted_worker import MODEL, ScriptedWorker, expected_tokens

OTHER = replace(MODEL, name="other", fingerprint="fp-2", vocab_size=400)
BOTH = (MODEL, OTHER)


async def pools_of(rig: Rig, model: ModelInfo, num_blocks: int = 256) -> tuple[ScriptedWorker, ScriptedWorker]:
    """A prefill and a decode worker of the model, named after it."""
    registration: dict[str, object] = {"model_name": model.name, "model": model_info_to_proto(model)}
    return (
        await rig.add(f"{model.name}-p", "prefill", num_blocks, registration),
        await rig.add(f"{model.name}-d", "decode", num_blocks, registration),
    )


@given(st.lists(st.tuples(st.sampled_from(BOTH), st.integers(1, 6)), min_size=1, max_size=12))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
async def test_a_request_goes_to_workers_of_its_model_only(asked: list[tuple[ModelInfo, int]]) -> None:
    """However long one queue is and however idle the other model's workers are."""
    async with scheduling_rig(BOTH) as rig:
        workers = {model.name: await pools_of(rig, model, num_blocks=6) for model in BOTH}
        streams = [rig.submit((7, i + 3), max_tokens, model=model) for i, (model, max_tokens) in enumerate(asked)]
        ends = [end for _, end in await asyncio.gather(*map(read_all, streams))]
        for (model, max_tokens), end in zip(asked, ends, strict=True):
            decode = f"{model.name}-d" if max_tokens > 1 else ""
            assert (end.timings.prefill_worker, end.timings.decode_worker) == (f"{model.name}-p", decode)
        await rig.until_idle()
        for name, (prefill, decode) in workers.items():
            of_model = [max_tokens for model, max_tokens in asked if model.name == name]
            assert len(prefill.submits) == len(of_model)
            assert len(decode.submits) == sum(max_tokens > 1 for max_tokens in of_model)


async def test_a_model_without_free_blocks_holds_up_no_other() -> None:
    async with scheduling_rig(BOTH) as rig:
        _, full = await pools_of(rig, MODEL, num_blocks=4)
        await pools_of(rig, OTHER)
        full.script.decode.clear()
        stuck = [rig.submit((5, 6), 14) for _ in range(3)]  # four blocks each
        await rig.until(lambda: rig.dispatcher.num_in_phase(MODEL.name, SequencePhase.RESERVING) == 1)
        others = [rig.submit((i + 3, 6), 14, model=OTHER) for i in range(20)]
        for i, stream in enumerate(others):
            assert (await read_all(stream))[0] == expected_tokens((i + 3, 6), 14)
        assert rig.dispatcher.num_in_phase(MODEL.name, SequencePhase.QUEUED) == 1
        full.script.decode.set()
        assert [len(tokens) for tokens, _ in await asyncio.gather(*map(read_all, stuck))] == [14] * 3
        await rig.until_idle()


async def test_a_model_whose_worker_answers_no_reservation_holds_up_no_other() -> None:
    async with scheduling_rig(BOTH) as rig:
        _, silent = await pools_of(rig, MODEL)
        await pools_of(rig, OTHER)
        silent.script.reserve.clear()
        stuck = rig.submit()
        await rig.until(lambda: silent.num_asked == 1)
        assert (await read_all(rig.submit(model=OTHER)))[0] == expected_tokens((5, 6, 7), 4)
        silent.script.reserve.set()
        assert (await read_all(stuck))[0] == expected_tokens((5, 6, 7), 4)


@pytest.mark.parametrize("bound", [{"max_queued_requests": 2}, {"max_queued_tokens": 32}])
async def test_one_models_backlog_leaves_the_others_bound_whole(bound: dict[str, int]) -> None:
    async with scheduling_rig(BOTH, **bound) as rig:
        decodes = [(await pools_of(rig, model, num_blocks=4))[1] for model in BOTH]
        for decode in decodes:
            decode.script.decode.clear()
        streams = []
        for model in BOTH:
            streams.append(rig.submit((5, 6), 14, model=model))  # all four blocks
            await first_delta(streams[-1])
            streams += [rig.submit((5, 6), 14, model=model) for _ in range(2)]
            with pytest.raises(PdserveError) as caught:
                rig.submit((5, 6), 14, model=model)
            assert caught.value.reason is ErrorReason.QUEUE_FULL
        assert {name: queue.num_requests for name, queue in rig.dispatcher.queues().items()} == {"tiny": 2, "other": 2}
        for decode in decodes:
            decode.script.decode.set()
        assert len(streams) == 6
        await rig.until(lambda: rig.dispatcher.num_in_flight == 0)


async def test_each_model_is_ready_by_its_own_workers() -> None:
    async with scheduling_rig(BOTH) as rig:
        await pools_of(rig, MODEL)
        assert [rig.dispatcher.is_ready(model.name) for model in BOTH] == [True, False]
        with pytest.raises(PdserveError) as caught:
            rig.submit(model=OTHER)
        assert caught.value.reason is ErrorReason.NO_WORKERS
        _, decode = await pools_of(rig, OTHER)
        assert [rig.dispatcher.is_ready(model.name) for model in BOTH] == [True, True]
        await decode.leave()
        await rig.until(lambda: not rig.dispatcher.is_ready(OTHER.name))
        assert rig.dispatcher.is_ready(MODEL.name)


async def test_choices_for_a_model_that_is_not_served_leave_nothing() -> None:
    async with scheduling_rig(BOTH) as rig:
        await pools_of(rig, MODEL)
        with pytest.raises(PdserveError) as caught:
            rig.dispatcher.submit([request(), request(model=replace(MODEL, name="third"))])
        assert caught.value.reason is ErrorReason.MODEL_NOT_FOUND
        assert rig.dispatcher.num_in_flight == 0
