"""Generation events to the response objects of /v1/chat/completions. Sends nothing."""

from collections.abc import Sequence

from coordinator.generation.generation import ChoiceDelta, ChoiceEnd, Generation, GenerationEvent
from coordinator.http_api.answers import UsageAnswer
from coordinator.http_api.chat_answers import (
    CalledFunction,
    ChatAnswer,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprob,
    ChatLogprobs,
    ChatMessageAnswer,
    FinishName,
    ToolCallAnswer,
    TopLogprob,
    WrittenChatChoice,
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
        self._choices = [_Choice() for _ in range(generation.num_choices)]

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
        logprobs = _chat_logprobs(self._logprobs(event))
        return self._chunk([_chunk_choice(event.choice, _delta(event, first_call), logprobs)])

    def usage_chunk(self, usage: UsageAnswer) -> ChatChunk:
        return self._chunk([]).model_copy(update={"usage": usage})

    def add(self, event: GenerationEvent) -> None:
        self._choices[event.choice].add(event, self._logprobs(event))

    def whole(self, usage: UsageAnswer) -> ChatAnswer:
        return ChatAnswer(
            id=f"chatcmpl-{self._generation.id}",
            object="chat.completion",
            created=self._created_s,
            model=self._generation.model.info.name,
            system_fingerprint=self._generation.model.info.fingerprint,
            choices=[choice.answer(index) for index, choice in enumerate(self._choices)],
            usage=usage,
        )

    def _logprobs(self, event: GenerationEvent) -> list[ChatLogprob]:
        """One a token; none where they were not asked for."""
        if not isinstance(event, ChoiceDelta):
            return []
        tokenizer = self._generation.model.tokenizer
        pairs = zip(event.token_ids, event.logprobs, strict=False)
        return [_logprob(tokenizer, token_id, logprobs) for token_id, logprobs in pairs]

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=f"chatcmpl-{self._generation.id}",
            object="chat.completion.chunk",
            created=self._created_s,
            model=self._generation.model.info.name,
            system_fingerprint=self._generation.model.info.fingerprint,
            choices=choices,
        )


class _Choice:
    """What has come of one choice, for an answer that is not streamed."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._calls: list[ToolCallAnswer] = []
        self._logprobs: list[str] = []
        self._end: ChoiceEnd | None = None

    def add(self, event: GenerationEvent, logprobs: Sequence[ChatLogprob]) -> None:
        self._logprobs += [entry.to_json() for entry in logprobs]
        if isinstance(event, ChoiceDelta):
            self._texts.append(event.text)
            self._calls += map(_call, event.tool_calls)
        elif isinstance(event, ChoiceEnd):
            self._end = event

    def answer(self, index: int) -> WrittenChatChoice:
        text = "".join(self._texts)
        message = ChatMessageAnswer(role="assistant", content=text)
        if self._calls:
            message = ChatMessageAnswer(role="assistant", content=text or None, tool_calls=self._calls)
        finish = None if self._end is None else _finish_name(self._end, len(self._calls))
        return WrittenChatChoice(
            index=index,
            message=message,
            logprobs=ChatLogprobs(content=[], refusal=None) if self._logprobs else None,
            finish_reason=finish,
            entries=self._logprobs,
        )


def _chat_logprobs(entries: list[ChatLogprob]) -> ChatLogprobs | None:
    """Null where none were asked for; there are tokens otherwise."""
    return ChatLogprobs(content=entries, refusal=None) if entries else None


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
