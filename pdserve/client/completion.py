"""A request's events put together to whole choices, the same for both clients. Opens no connection."""

from collections import defaultdict
from dataclasses import dataclass, field

from pdserve.client.inference import Delta, Finished, GenerateEvent, PromptEcho, Started, Timings, ToolCall, Usage
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.sampling import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice, whole. `logprobs`, if asked for, are in step with `token_ids`; `prompt` comes with `echo` only."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    prompt: PromptEcho | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """All choices of one request, in order. `text` is the first one's."""

    started: Started
    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        return self.choices[0].text


@dataclass(slots=True)
class _Parts:
    """What came of one choice so far."""

    deltas: list[Delta] = field(default_factory=list[Delta])
    prompt: PromptEcho | None = None
    finished: Finished | None = None


class CompletionBuilder:
    """Takes a request's events in the order in which they come."""

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices
        self._started: Started | None = None
        self._parts: defaultdict[int, _Parts] = defaultdict(_Parts)

    def add(self, event: GenerateEvent) -> None:
        match event:
            case Started():
                self._started = event
            case PromptEcho():
                self._parts[event.choice].prompt = event
            case Delta():
                self._parts[event.choice].deltas.append(event)
            case Finished():
                self._parts[event.choice].finished = event

    def completion(self) -> Completion:
        """After the last event.

        Raises:
            PdserveError: INTERNAL: the stream ended without an error, yet something is missing.
        """
        if self._started is None:
            raise PdserveError(ErrorReason.INTERNAL, "the stream ended before it began")
        return Completion(self._started, tuple(_choice(self._parts[i], i) for i in range(self._num_choices)))


def _choice(parts: _Parts, index: int) -> Choice:
    if parts.finished is None:
        raise PdserveError(ErrorReason.INTERNAL, f"the stream ended before choice {index} was finished")
    return Choice(
        text="".join(delta.text for delta in parts.deltas),
        token_ids=tuple(token_id for delta in parts.deltas for token_id in delta.token_ids),
        logprobs=tuple(entry for delta in parts.deltas for entry in delta.logprobs),
        tool_calls=tuple(call for delta in parts.deltas for call in delta.tool_calls),
        finish_reason=parts.finished.finish_reason,
        usage=parts.finished.usage,
        timings=parts.finished.timings,
        prompt=parts.prompt,
    )
