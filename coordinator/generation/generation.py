"""One client request's choices as text events, the same for every API, streamed or not. Knows no wire format."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.generation.logprobs import shown_logprobs
from coordinator.generation.outputs import ChoiceOutput
from coordinator.generation.served_model import TextModel
from coordinator.generation.stream_merge import StreamMerge
from coordinator.sequences import SequenceEnd, SequenceRequest, SequenceStream, SequenceTimings, TokenDelta
from coordinator.text.tool_calls import ToolCall
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.sampling import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """With `echo`, the first event of a choice: its prompt. Texts and logprobs are in step with `token_ids`.

    `logprobs` is empty unless asked for; its first entry is None, since nothing precedes the first token.
    """

    choice: int
    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.token_texts)


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """Output tokens from `first_index` on, and what may be shown now of text and tool calls; each may be empty.

    `token_texts` and, if asked for, `logprobs` are in step with `token_ids`. A token's text is what it adds before any
    stop string is looked for: `text` may come later, or never.
    """

    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    token_texts: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """The last event of a choice. `usage` is this choice's own."""

    choice: int
    finish_reason: FinishReason
    usage: Usage
    timings: SequenceTimings


GenerationEvent = PromptEcho | ChoiceDelta | ChoiceEnd


class Generation:
    """One request's choices. Iterate for its events; `close` cancels what has not ended, on every way out.

    Raises, while iterating:
        PdserveError: a choice failed; nothing follows.
    """

    def __init__(
        self,
        model: TextModel,
        outputs: Sequence[ChoiceOutput],
        streams: Sequence[SequenceStream],
        num_prompts: int,
    ) -> None:
        sequence = outputs[0].request
        self.model = model
        self.id: SequenceId = streams[0].id
        self.seed = sequence.sampling.seed
        self.deadline_s = sequence.deadline_s
        self.num_choices = len(outputs)
        self.choices_per_prompt = len(outputs) // num_prompts
        self.num_prompt_tokens = sum(len(output.request.token_ids) for output in outputs[:: self.choices_per_prompt])
        self.outcome: str | None = None
        self._outputs, self._streams = outputs, streams
        self._num_cached_tokens = [0] * len(outputs)
        self._merge = StreamMerge(aiter(stream) for stream in streams)
        self._events: deque[GenerationEvent] = deque()

    @property
    def num_completion_tokens(self) -> int:
        """So far, of all choices, up to and including the token that completed a stop string."""
        return sum(output.text.num_tokens for output in self._outputs)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts, each counted once: what no choice had to compute, as far as its choices have begun.

        That one choice finds what another of the same request has just computed is not counted.
        """
        least: dict[int, int] = {}
        for index, output in enumerate(self._outputs):
            if output.text.num_tokens:
                prompt, cached = index // self.choices_per_prompt, self._num_cached_tokens[index]
                least[prompt] = min(cached, least.get(prompt, cached))
        return sum(least.values())

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> GenerationEvent:
        while not self._events:
            if not self._merge.open:
                raise StopAsyncIteration
            try:
                index, event = await self._merge.next()
                self._take(index, event)
            except PdserveError as error:
                self.outcome = error.reason.value
                raise
        return self._events.popleft()

    def close(self) -> None:
        """Cancel the sequences that still run; after all have ended this calls nobody."""
        for index in self._merge.open:
            self._streams[index].cancel()
        self._merge.close()

    def _take(self, index: int, event: TokenDelta | SequenceEnd) -> None:
        if isinstance(event, TokenDelta):
            self._take_tokens(index, event)
        elif event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._num_cached_tokens[index] = event.num_cached_tokens
            self._end(index, event.finish_reason, event.timings)
        else:
            cancelled = event.finish_reason is FinishReason.CANCELLED
            reason = ErrorReason.CANCELLED if cancelled else ErrorReason.INTERNAL
            raise PdserveError(reason, f"the sequence ended as {event.finish_reason.value}")

    def _take_tokens(self, index: int, event: TokenDelta) -> None:
        output, text = self._outputs[index], self._outputs[index].text
        if event.first_index != text.num_tokens:
            message = f"expected output token {text.num_tokens} of choice {index}, got {event.first_index}"
            raise PdserveError(ErrorReason.INTERNAL, message)
        if event.first_index == 0 and output.prompt_texts is not None:
            self._events.append(_echo(index, output.request, output.prompt_texts, event))
        self._num_cached_tokens[index] += event.num_cached_tokens
        piece = text.push(event.token_ids)
        logprobs = shown_logprobs(event.logprobs, output.request.sampling.num_logprobs, len(event.token_ids))
        self._events.append(
            ChoiceDelta(
                choice=index,
                first_index=event.first_index,
                token_ids=piece.token_ids,
                text=piece.text,
                token_texts=piece.token_texts,
                logprobs=logprobs[: len(piece.token_ids)],
                tool_calls=piece.tool_calls,
            )
        )
        if text.stopped:
            stream = self._streams[index]
            stream.cancel()
            self._merge.drop(index)
            self._end(index, FinishReason.STOP, stream.timings())

    def _end(self, index: int, reason: FinishReason, timings: SequenceTimings) -> None:
        output, text = self._outputs[index], self._outputs[index].text
        held = text.flush()
        if held.text or held.tool_calls:
            self._events.append(ChoiceDelta(index, text.num_tokens, (), held.text, tool_calls=held.tool_calls))
        usage = Usage(len(output.request.token_ids), text.num_tokens, self._num_cached_tokens[index])
        self._events.append(ChoiceEnd(index, reason, usage, timings))
        if not self._merge.open:
            self.outcome = reason.value


def _echo(index: int, request: SequenceRequest, texts: tuple[str, ...], event: TokenDelta) -> PromptEcho:
    num_wanted = request.sampling.num_prompt_logprobs
    logprobs = shown_logprobs(event.prompt_logprobs, num_wanted, len(texts) - 1)
    return PromptEcho(index, request.token_ids, texts, () if num_wanted is None else (None, *logprobs))
