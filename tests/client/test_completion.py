import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.client import Delta, Finished, FinishReason, PdserveError, PromptEcho, Started, Timings, ToolCall, Usage
from pdserve.client.completion import CompletionBuilder
from pdserve.client.inference import GenerateEvent
from pdserve.core.ids import SequenceId
from pdserve.core.sampling import TokenLogprobs

STARTED = Started(SequenceId(1, 2), 3, 4, "m", "f")
TIMINGS = Timings(0, 0, 0, 0, 0, 0, "p", "d")


def events_of(choice: int, text: str, echo: bool) -> list[GenerateEvent]:
    """A choice that says `text`, a character a token, and calls a tool at its end."""
    deltas = [Delta(choice, i, (ord(char),), char, (TokenLogprobs(-float(i)),)) for i, char in enumerate(text)]
    calls = Delta(choice, len(text), (), "", (), (ToolCall(f"c{choice}", "f", "{}"),))
    finished = Finished(choice, FinishReason.STOP, Usage(3, len(text), 0), TIMINGS)
    return [*([PromptEcho(choice, "prompt")] if echo else []), *deltas, calls, finished]


@given(st.lists(st.text(max_size=6), min_size=1, max_size=4), st.booleans(), st.randoms(use_true_random=False))
def test_choices_come_whole_however_they_are_interleaved(texts: list[str], echo: bool, rng: random.Random) -> None:
    waiting = [events_of(choice, text, echo) for choice, text in enumerate(texts)]
    builder = CompletionBuilder(len(texts))
    builder.add(STARTED)
    while any(waiting):
        builder.add(rng.choice([events for events in waiting if events]).pop(0))
    completion = builder.completion()
    assert completion.started is STARTED
    assert completion.text == texts[0]
    for index, (choice, text) in enumerate(zip(completion.choices, texts, strict=True)):
        assert (choice.text, choice.token_ids) == (text, tuple(map(ord, text)))
        assert [entry.logprob for entry in choice.logprobs] == [-float(i) for i in range(len(text))]
        assert [call.id for call in choice.tool_calls] == [f"c{index}"]
        assert choice.prompt == (PromptEcho(index, "prompt") if echo else None)
        assert choice.usage.completion_tokens == len(text)


def test_an_answer_that_never_began_is_an_error() -> None:
    with pytest.raises(PdserveError, match="before it began"):
        CompletionBuilder(1).completion()
