"""Generation events to the response objects of /v1/chat/completions. Sends nothing."""

from collections.abc import Sequence

from coordinator.generation.generation import ChoiceDelta, ChoiceEnd, Generation, GenerationEvent
from coordinator.http_api.answers import UsageAnswer
from coordinator.http_api.chat_answers import (
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprob,
    ChatLogprobs,
    ChatMessageAnswer,
    FinishName,
    ToolCallAnswer,
    TopLogprob,
)
from coordinator.text.tool_calls import ToolCall
from pdserve.core.sampling import TokenLogprobs
from pdserve.core.tokenizer import TextTokenizer


class ChatFormat:
    """See `formats.AnswerFormat`."""

    def __init__(self, generation: Generation, created_s: int) -> None:
        self._generation = generation
        self._created_s = created_s
        self._num_calls = [0] * generation.num_choices

    def first_chunk(self, choice: int) -> ChatChunk:
        return self._chunk([_chunk_choice(choice, ChatMessageAnswer(role="assistant", content=""))])

    def chunk(self, event: GenerationEvent) -> ChatChunk | None:
        if isinstance(event, ChoiceEnd):
            finish = _finish_name(event, self._num_calls[event.choice])
            return self._chunk([_chunk_choice(event.choice, ChatMessageAnswer(), finish_reason=finish)])
        if not isinstance(event, ChoiceDelta) or not (event.text or event.tool_calls or event.logprobs):
            return None
        first_call = self._num_calls[event.choice]
        self._num_calls[event.choice] += len(event.tool_calls)
        return self._chunk([_chunk_choice(event.choice, _delta(event, first_call), self._logprobs([event]))])

    def usage_chunk(self, usage: UsageAnswer) -> ChatChunk:
        return self._chunk([]).model_copy(update={"usage": usage})

    def whole(self, events: Sequence[GenerationEvent], usage: UsageAnswer) -> ChatAnswer:
        deltas: list[list[ChoiceDelta]] = [[] for _ in range(self._generation.num_choices)]
        for event in events:
            if isinstance(event, ChoiceDelta):
                deltas[event.choice].append(event)
        ends = sorted((event for event in events if isinstance(event, ChoiceEnd)), key=lambda end: end.choice)
        return ChatAnswer(
            id=f"chatcmpl-{self._generation.id}",
            object="chat.completion",
            created=self._created_s,
            model=self._generation.model.info.name,
            system_fingerprint=self._generation.model.info.fingerprint,
            choices=[self._whole_choice(end, deltas[end.choice]) for end in ends],
            usage=usage,
        )

    def _whole_choice(self, end: ChoiceEnd, deltas: Sequence[ChoiceDelta]) -> ChatChoice:
        text = "".join(delta.text for delta in deltas)
        calls = [_call(call) for delta in deltas for call in delta.tool_calls]
        message = ChatMessageAnswer(role="assistant", content=text)
        if calls:
            message = ChatMessageAnswer(role="assistant", content=text or None, tool_calls=calls)
        return ChatChoice(
            index=end.choice,
            message=message,
            logprobs=self._logprobs(deltas),
            finish_reason=_finish_name(end, len(calls)),
        )

    def _logprobs(self, deltas: Sequence[ChoiceDelta]) -> ChatLogprobs | None:
        """Null where none were asked for; there are tokens otherwise."""
        tokenizer = self._generation.model.tokenizer
        entries = [
            _logprob(tokenizer, token_id, logprobs)
            for delta in deltas
            for token_id, logprobs in zip(delta.token_ids, delta.logprobs, strict=False)
        ]
        return ChatLogprobs(content=entries, refusal=None) if entries else None

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=f"chatcmpl-{self._generation.id}",
            object="chat.completion.chunk",
            created=self._created_s,
            model=self._generation.model.info.name,
            system_fingerprint=self._generation.model.info.fingerprint,
            choices=choices,
        )


def _delta(event: ChoiceDelta, first_call: int) -> ChatMessageAnswer:
    if not event.tool_calls:
        return ChatMessageAnswer(content=event.text)
    calls = [_call(call).model_copy(update={"index": first_call + i}) for i, call in enumerate(event.tool_calls)]
    if not event.text:
        return ChatMessageAnswer(tool_calls=calls)
    return ChatMessageAnswer(content=event.text, tool_calls=calls)


def _call(call: ToolCall) -> ToolCallAnswer:
    function = CalledFunction(name=call.name, arguments=call.arguments)
    return ToolCallAnswer(id=call.id, type="function", function=function)


def _logprob(tokenizer: TextTokenizer, token_id: int, logprobs: TokenLogprobs) -> ChatLogprob:
    top = [_top_logprob(tokenizer, *entry) for entry in logprobs.top]
    of_token = _top_logprob(tokenizer, token_id, logprobs.logprob)
    return ChatLogprob(token=of_token.token, logprob=of_token.logprob, bytes=of_token.bytes, top_logprobs=top)


def _top_logprob(tokenizer: TextTokenizer, token_id: int, logprob: float) -> TopLogprob:
    special = tokenizer.special_token_text(token_id)
    data = special.encode() if special else tokenizer.token_bytes(token_id)
    return TopLogprob(token=tokenizer.token_text(token_id), logprob=logprob, bytes=list(data))


def _finish_name(end: ChoiceEnd, num_calls: int) -> FinishName:
    """An answer that was cut is "length", whatever calls it made before."""
    if end.finish_reason.value != "stop":
        return "length"
    return "tool_calls" if num_calls else "stop"


def _chunk_choice(
    index: int,
    delta: ChatMessageAnswer,
    logprobs: ChatLogprobs | None = None,
    finish_reason: FinishName | None = None,
) -> ChatChunkChoice:
    return ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
