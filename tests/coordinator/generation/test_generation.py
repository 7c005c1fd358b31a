import asyncio
import threading
from dataclasses import replace

import pytest

from coordinator.generation.generation import ChoiceDelta, PromptEcho
from coordinator.generation.generator import THREAD_ABOVE_CHARS, Generator
from coordinator.generation.inputs import GenerationInput, TextPrompt, TokenPrompt
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.sampling import FinishReason
from tests.coordinator.text_fakes import (
    CONTEXT,
    EOS,
    RecordingObserver,
    Script,
    ScriptedScheduler,
    build_generator,
    byte_tokenizer,
    echo_scheduler,
    run,
    scheduler_of,
    text_model,
    text_request,
)


def outcomes(generator: Generator) -> list[str]:
    observer = generator._observer
    assert isinstance(observer, RecordingObserver)
    return [record.outcome for record in observer.records]


async def test_text_usage_and_timings_of_a_normal_completion() -> None:
    generator = build_generator(scheduler := echo_scheduler(b"hey"))
    deltas, (end,) = await run(generator, text_request(generator))
    assert "".join(delta.text for delta in deltas) == "hey"
    assert [delta.first_index for delta in deltas] == [0, 1, 2, 3]
    assert end.finish_reason is FinishReason.STOP
    assert (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_tokens) == (2, 4, 2)
    assert end.timings.prefill_worker == "p"
    assert scheduler.num_cancels == 0


@pytest.mark.parametrize(("max_tokens", "text"), [(1, "Hello"), (2, "Hello!"), (3, "Hello! "), (4, "Hello! 😊")])
async def test_a_character_cut_by_max_tokens_is_dropped(max_tokens: int, text: str) -> None:
    smile = "😊".encode()
    model = text_model(byte_tokenizer([b"Hello", b" " + smile[:2], smile[2:]]))
    generator = build_generator(scheduler_of([257], [ord("!")], [258], [259], [EOS]), model)
    deltas, (end,) = await run(generator, text_request(generator, max_tokens=max_tokens))
    assert "".join(delta.text for delta in deltas) == text
    assert (end.finish_reason, end.usage.completion_tokens) == (FinishReason.LENGTH, max_tokens)


async def test_a_stop_string_cancels_once_and_later_tokens_do_not_count() -> None:
    generator = build_generator(scheduler := scheduler_of(b"ab", b"cdef", b"gh", hang=True))
    deltas, (end,) = await run(generator, text_request(generator, stop=["cd"]))
    assert "".join(delta.text for delta in deltas) == "ab"
    assert (end.finish_reason, end.usage.completion_tokens) == (FinishReason.STOP, 4)
    assert deltas[-1].token_ids == tuple(b"cd")
    assert end.timings.ttft_s == 0.25
    assert end.usage.cached_tokens == 2
    assert scheduler.num_cancels == 1


async def test_text_held_for_a_stop_string_that_does_not_come_is_flushed() -> None:
    generator = build_generator(echo_scheduler(b"xST"))
    deltas, _ = await run(generator, text_request(generator, stop=["STOP"]))
    assert "".join(delta.text for delta in deltas) == "xST"


async def test_a_first_token_that_is_eos_gives_empty_text() -> None:
    generator = build_generator(scheduler_of([EOS]))
    deltas, (end,) = await run(generator, text_request(generator))
    assert ("".join(d.text for d in deltas), end.finish_reason) == ("", FinishReason.STOP)


async def test_many_normal_completions_cancel_nothing() -> None:
    generator = build_generator(scheduler := echo_scheduler(b"ok"))
    for _ in range(200):
        await run(generator, text_request(generator))
    assert scheduler.num_cancels == 0
    assert outcomes(generator) == ["stop"] * 200


async def test_choices_interleave_and_each_is_complete() -> None:
    script_of = {0: Script([b"a", b"b"], end=FinishReason.STOP), 1: Script([b"xyz"]), 2: Script([b"q"])}
    scheduler = ScriptedScheduler(lambda request: script_of[request.sampling.choice])
    generator = build_generator(scheduler)
    wanted = GenerationInput((TokenPrompt([1, 2]),), generator.clock(), n=3)
    deltas, ends = await run(generator, wanted)
    texts = ["".join(d.text for d in deltas if d.choice == choice) for choice in range(3)]
    assert texts == ["ab", "xyz", "q"]
    assert sorted(end.choice for end in ends) == [0, 1, 2]
    assert scheduler.num_cancels == 0


async def test_one_failing_choice_fails_the_request_and_cancels_only_the_others() -> None:
    failure = PdserveError(ErrorReason.WORKER_LOST, "gone")
    scripts = [Script([b"a"], hang=True), Script([b"b"], error=failure), Script([b"c"])]
    scheduler = ScriptedScheduler(lambda request: scripts[request.sampling.choice])
    generator = build_generator(scheduler)
    with pytest.raises(PdserveError, match="gone"):
        await run(generator, GenerationInput((TokenPrompt([1]),), generator.clock(), n=3))
    assert scheduler.streams[1].num_cancels == 0
    assert scheduler.streams[0].num_cancels == 1
    assert outcomes(generator) == ["worker_lost"]


@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_early_cancels_every_open_sequence(n: int) -> None:
    generator = build_generator(scheduler := scheduler_of(b"ab", hang=True))
    wanted = GenerationInput((TokenPrompt([1]),), generator.clock(), n=n)
    async with generator.generate(wanted) as generation:
        first = await anext(generation)
        assert isinstance(first, ChoiceDelta)
    assert [stream.num_cancels for stream in scheduler.streams] == [1] * n
    assert outcomes(generator) == ["cancelled"]


@pytest.mark.parametrize("n", [1, 3])
async def test_a_cancelled_task_cancels_every_open_sequence(n: int) -> None:
    generator = build_generator(scheduler := scheduler_of(hang=True))
    task = asyncio.create_task(run(generator, GenerationInput((TokenPrompt([1]),), generator.clock(), n=n)))
    await asyncio.wait_for(scheduler.submitted.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [stream.num_cancels for stream in scheduler.streams] == [1] * n


async def test_a_refused_request_leaves_nothing() -> None:
    refuse = PdserveError(ErrorReason.QUEUE_FULL, "full", retry_after_s=2)
    generator = build_generator(ScriptedScheduler(lambda _: Script([]), refuse=refuse))
    with pytest.raises(PdserveError, match="full"):
        await run(generator, text_request(generator))
    assert outcomes(generator) == ["queue_full"]


async def test_a_stream_that_breaks_off_is_an_error_not_a_short_answer() -> None:
    generator = build_generator(scheduler := scheduler_of(b"ab", hang=True))
    async with generator.generate(text_request(generator)) as generation:
        await anext(generation)
        scheduler.streams[0]._cancelled.set()
        with pytest.raises(PdserveError, match="broke off"):
            await anext(generation)


@pytest.mark.parametrize(
    ("end", "reason"), [(FinishReason.CANCELLED, ErrorReason.CANCELLED), (FinishReason.ERROR, ErrorReason.INTERNAL)]
)
async def test_ends_that_are_no_completion_are_errors(end: FinishReason, reason: ErrorReason) -> None:
    generator = build_generator(scheduler_of(b"a", end=end))
    with pytest.raises(PdserveError) as caught:
        await run(generator, text_request(generator))
    assert caught.value.reason is reason


async def test_two_requests_under_one_label_both_run() -> None:
    generator = build_generator(scheduler := echo_scheduler(b"same"))
    wanted = GenerationInput((TokenPrompt([1]),), generator.clock(), label="job-1")
    results = await asyncio.gather(run(generator, wanted), run(generator, wanted))
    assert ["".join(d.text for d in deltas) for deltas, _ in results] == ["same", "same"]
    assert len({stream.id for stream in scheduler.streams}) == 2
    assert [stream.request.label for stream in scheduler.streams] == ["job-1", "job-1"]


async def test_unseeded_requests_differ_and_seeded_ones_keep_their_seed() -> None:
    generator = build_generator(scheduler := echo_scheduler(b"x"))
    for seed in (None, None, 7):
        await run(generator, text_request(generator, seed=seed))
    seeds = [stream.request.sampling.seed for stream in scheduler.streams]
    assert seeds[0] != seeds[1]
    assert seeds[2] == 7


async def test_long_prompts_are_encoded_off_the_event_loop_and_so_are_many_short_ones() -> None:
    model = text_model(context_length=10 * THREAD_ABOVE_CHARS)
    generator = build_generator(scheduler := echo_scheduler(b"x"), model)
    threads: list[str] = []
    encode = model.tokenizer.encode

    def spy(text: str, add_special: bool = True) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(text, add_special)

    model.tokenizer.encode = spy  # type: ignore[method-assign]
    half = THREAD_ABOVE_CHARS // 2 + 1
    for texts in (("short",), ("x" * (2 * half),), ("x" * half, "y" * half)):
        request = replace(text_request(generator, max_tokens=2), prompts=tuple(map(TextPrompt, texts)))
        await run(generator, request)
    assert [name.split("_")[0] for name in threads] == ["MainThread", "tokenizer", "tokenizer", "tokenizer"]
    assert [len(stream.request.token_ids) for stream in scheduler.streams] == [5, 2 * half, half, half]
    generator.close()


async def test_a_deadline_that_passed_while_encoding_costs_no_submit() -> None:
    generator = build_generator(scheduler := echo_scheduler(b"x"))
    late = GenerationInput((TokenPrompt([1]),), generator.clock() - 5, timeout_s=1.0)
    with pytest.raises(PdserveError) as caught:
        await run(generator, late)
    assert caught.value.reason is ErrorReason.DEADLINE_EXCEEDED
    assert scheduler.streams == []


async def test_an_unknown_model_is_not_found_and_an_empty_name_is_the_only_one() -> None:
    generator = build_generator(echo_scheduler(b"x"))
    with pytest.raises(PdserveError) as caught:
        await run(generator, GenerationInput((TokenPrompt([1]),), generator.clock(), model="gpt-9"))
    assert (caught.value.reason, caught.value.param) == (ErrorReason.MODEL_NOT_FOUND, "model")
    await run(generator, GenerationInput((TokenPrompt([1]),), generator.clock(), model=""))


async def test_ids_beyond_the_context_are_refused_before_each_is_looked_at() -> None:
    generator = build_generator(scheduler := echo_scheduler(b"x"))
    wanted = GenerationInput((TokenPrompt(["no id"] * CONTEXT),), generator.clock())
    with pytest.raises(PdserveError, match=f"{CONTEXT} tokens"):
        await run(generator, wanted)
    assert scheduler.streams == []


async def test_an_echo_comes_first_with_the_texts_of_the_prompt() -> None:
    generator = build_generator(echo_scheduler(b"x"))
    wanted = replace(text_request(generator, "hé", logprobs=0), echo=True, n=2)
    async with generator.generate(wanted) as generation:
        events = [event async for event in generation]
    for choice in range(2):
        first, *others = [event for event in events if event.choice == choice]
        assert isinstance(first, PromptEcho)
        assert (first.token_ids, first.token_texts) == (tuple("hé".encode()), ("h", "", "é"))
        assert [entry and entry.logprob for entry in first.logprobs] == [None, -1.0, -1.0]
        assert not any(isinstance(event, PromptEcho) for event in others)
