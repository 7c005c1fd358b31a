"""A byte-level tokenizer without files, a scheduler that emits scripted tokens, and what tests build from them."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from coordinator.generation.generation import ChoiceDelta, ChoiceEnd
from coordinator.generation.generator import GenerationRecord, Generator
from coordinator.generation.inputs import GenerationInput, SamplingInput, TextPrompt
from coordinator.generation.served_model import ServedModels, TextModel
from coordinator.sequences import SequenceEnd, SequenceRequest, SequenceTimings, TokenDelta
from coordinator.text.chat_template import ChatTemplate
from pdserve.core.errors import PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.model_info import ModelInfo
from pdserve.core.sampling import FinishReason, TokenLogprobs, finish_reason_after
from pdserve.core.tokenizer import TextTokenizer
from pdserve.core.tokenizer.token_bytes import _BYTE_OF_CHAR
from pdserve.serving.settings import CoordinatorSettings

EOS = 256
CONTEXT = 64
NUM_CACHED = 2
CHATML = (
    "{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be first') }}{% endif %}"
    "{{ '<' + message['role'] + '>' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
_CHAR_OF_BYTE = {byte: char for char, byte in _BYTE_OF_CHAR.items()}


def byte_tokenizer(extra: Sequence[bytes] = (), special: Sequence[str] = ()) -> TextTokenizer:
    """Ids 0..255 are the bytes, 256 a special EOS, 257… `extra` ones (which encoding never uses), then `special`."""
    vocab = {_CHAR_OF_BYTE[byte]: byte for byte in range(256)} | {"<eos>": EOS}
    for token in extra:
        vocab["".join(_CHAR_OF_BYTE[byte] for byte in token)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<eos>", *special)])
    return TextTokenizer(tokenizer)


def text_model(
    tokenizer: TextTokenizer | None = None, context_length: int = CONTEXT, template: str | None = CHATML
) -> TextModel:
    tokenizer = tokenizer or byte_tokenizer()
    info = ModelInfo("tiny", "f1", "LlamaForCausalLM", "float32", tokenizer.num_tokens, context_length, (EOS,))
    return TextModel(info, tokenizer, None if template is None else ChatTemplate(template, {}))


class ScriptedStream:
    """Emits its tokens until finished; then, by script, an error or a wait for `cancel`."""

    def __init__(self, sequence_id: SequenceId, request: SequenceRequest, script: "Script") -> None:
        self.id = sequence_id
        self.request = request
        self.num_cancels = 0
        self.num_emitted = 0
        self._script = script
        self._cancelled = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[TokenDelta | SequenceEnd]:
        index = 0
        for token_ids in self._script.steps:
            taken: list[int] = []
            reason = None
            for token_id in token_ids:
                taken.append(token_id)
                reason = finish_reason_after(token_id, index + len(taken), self.request.sampling, frozenset({EOS}))
                if reason:
                    break
            of_prompt = self._prompt_logprobs() if index == 0 else ()
            num_cached = self._script.num_cached if index == 0 else 0
            yield TokenDelta(index, tuple(taken), self._logprobs(taken), of_prompt, num_cached)
            index += len(taken)
            self.num_emitted = index
            if reason:
                timings = SequenceTimings(ttft_s=0.5, prefill_worker="p")
                yield SequenceEnd(reason, timings, num_cached_tokens=self._script.num_cached)
                return
        if self._script.error is not None:
            raise self._script.error
        if self._script.hang:
            await self._cancelled.wait()
            return
        yield SequenceEnd(self._script.end, SequenceTimings(), num_cached_tokens=self._script.num_cached)

    def _logprobs(self, token_ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        num_top = self.request.sampling.num_logprobs
        return () if num_top is None else tuple(self._script.logprobs_of(i, num_top) for i in token_ids)

    def _prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        num_top, token_ids = self.request.sampling.num_prompt_logprobs, self.request.token_ids[1:]
        return () if num_top is None else tuple(self._script.logprobs_of(i, num_top) for i in token_ids)

    def cancel(self) -> None:
        self.num_cancels += 1
        self._cancelled.set()

    def timings(self) -> SequenceTimings:
        return SequenceTimings(ttft_s=0.25)


def scripted_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """The token and those with the next ids, one less likely than the other."""
    top = tuple((token_id + i, -1.0 - i) for i in range(num_top))
    return TokenLogprobs(-1.0, top)


@dataclass
class Script:
    """`steps`: the ids of each event. Afterwards `error` is raised, or with `hang` nothing comes until cancelled.

    `logprobs_of` gives those of a token, where the request asks for them.
    """

    steps: Sequence[Sequence[int]]
    error: PdserveError | None = None
    hang: bool = False
    end: FinishReason = FinishReason.LENGTH
    logprobs_of: Callable[[int, int], TokenLogprobs] = scripted_logprobs
    num_cached: int = NUM_CACHED


@dataclass
class ScriptedScheduler:
    """`script_of` tells what each submitted sequence emits."""

    script_of: Callable[[SequenceRequest], Script]
    streams: list[ScriptedStream] = field(default_factory=list)
    refuse: PdserveError | None = None
    ready: bool = True
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    _ids: "itertools.count[int]" = field(default_factory=itertools.count)

    def submit(self, requests: Sequence[SequenceRequest]) -> list[ScriptedStream]:
        if self.refuse is not None:
            raise self.refuse
        streams = [ScriptedStream(SequenceId(7, next(self._ids)), r, self.script_of(r)) for r in requests]
        self.streams += streams
        self.submitted.set()
        return streams

    def is_ready(self, model: str) -> bool:
        return self.ready

    @property
    def num_cancels(self) -> int:
        return sum(stream.num_cancels for stream in self.streams)


class RecordingObserver:
    def __init__(self) -> None:
        self.records: list[GenerationRecord] = []

    def generation_ended(self, record: GenerationRecord) -> None:
        self.records.append(record)


def scheduler_of(*steps: Sequence[int], **options: object) -> ScriptedScheduler:
    script = Script(steps, **options)  # type: ignore[arg-type]
    return ScriptedScheduler(lambda _request: script)


def echo_scheduler(text: bytes) -> ScriptedScheduler:
    """Every sequence emits `text` a byte at a time, then EOS."""
    return scheduler_of(*[[byte] for byte in text], [EOS])


def build_generator(scheduler: ScriptedScheduler, model: TextModel | None = None, **settings: object) -> Generator:
    chosen = CoordinatorSettings.model_validate(settings)
    return Generator(ServedModels([model or text_model()]), scheduler, chosen, RecordingObserver())


def text_request(generator: Generator, text: str = "hi", **sampling: object) -> GenerationInput:
    return GenerationInput(
        prompts=(TextPrompt(text),),
        arrival_s=generator.clock(),
        sampling=SamplingInput(**sampling),  # type: ignore[arg-type]
    )


async def run(generator: Generator, request: GenerationInput) -> tuple[list[ChoiceDelta], list[ChoiceEnd]]:
    """All deltas and ends of one generation."""
    async with asyncio.timeout(30), generator.generate(request) as generation:
        events = [event async for event in generation]
    return (
        [event for event in events if isinstance(event, ChoiceDelta)],
        [event for event in events if isinstance(event, ChoiceEnd)],
    )
