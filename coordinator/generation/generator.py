"""Starts generations: check, tokenise, submit, and make sure that what was started is ended. Knows no wire format."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from coordinator.generation.generation import Generation
from coordinator.generation.inputs import GenerationInput, Prompt
from coordinator.generation.outputs import choice_outputs
from coordinator.generation.sequence_requests import check_prompt_lengths, sequence_requests
from coordinator.generation.served_model import ServedModels, TextModel
from coordinator.generation.validation import check_options
from coordinator.sequences import SequenceScheduler
from coordinator.text.prompts import clean_text, encode_prompt, num_chars, render_prompt
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.serving.settings import CoordinatorSettings

THREAD_ABOVE_CHARS = 16 * 1024
"""At the slowest, characters of many scripts mixed, the event loop encodes as many in some 30 ms."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """What became of one client request. `outcome`: a FinishReason's value, or an ErrorReason's."""

    model: str
    outcome: str
    prompt_tokens: int
    completion_tokens: int
    duration_s: float


class GenerationObserver(Protocol):
    def generation_ended(self, record: GenerationRecord) -> None:
        """Called exactly once a request, rejected ones included."""
        ...


class Generator:
    """Starts generations. One for all APIs of a process; `close` it at the end."""

    def __init__(
        self,
        models: ServedModels,
        scheduler: SequenceScheduler,
        settings: CoordinatorSettings,
        observer: GenerationObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.models = models
        self.settings = settings
        self.clock = clock
        self._scheduler = scheduler
        self._observer = observer
        # One thread: long prompts must not take every core from the workers, and the event loop goes on meanwhile.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @asynccontextmanager
    async def generate(self, request: GenerationInput) -> AsyncGenerator[Generation]:
        """Check, tokenise and submit `request`; leaving the block cancels what still runs.

        Raises:
            PdserveError: as `validation`, and as `SequenceScheduler.submit`; nothing is left behind.
        """
        generation: Generation | None = None
        outcome = ErrorReason.CANCELLED.value
        try:
            generation = await self._start(request)
            yield generation
        except PdserveError as error:
            outcome = error.reason.value
            raise
        finally:
            if generation is not None:
                generation.close()
                outcome = generation.outcome or outcome
            self._record(request, generation, outcome)

    def not_ready_reason(self) -> str | None:
        """Why requests would be refused, or None."""
        missing = [m.info.name for m in self.models if not self._scheduler.is_ready(m.info.name)]
        return f"draining, or no live worker of some role, for: {', '.join(missing)}" if missing else None

    def is_ready(self, model: TextModel) -> bool:
        return self._scheduler.is_ready(model.info.name)

    async def encode(self, prompts: Sequence[Prompt], model: TextModel, must_fit: bool = True) -> list[list[int]]:
        """Token ids of any prompts, without keeping the event loop from anything else.

        Raises:
            PdserveError: as `render_prompt` and `encode_prompt`.
        """
        size = sum(num_chars(prompt, THREAD_ABOVE_CHARS + 1) for prompt in prompts)
        rendered = await self.text_work(size, lambda: [render_prompt(prompt, model) for prompt in prompts])

        def work() -> list[list[int]]:
            pairs = zip(prompts, rendered, strict=True)
            return [encode_prompt(prompt, of_prompt, model, must_fit) for prompt, of_prompt in pairs]

        return await self.text_work(sum(map(len, rendered)), work)

    async def text_work(self, size: int, work: Callable[[], Result]) -> Result:
        """Do `work`, which goes through `size` characters or ids: on the tokenizer's thread if they are many."""
        if size <= THREAD_ABOVE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)

    def close(self) -> None:
        self._encoder.shutdown(wait=False, cancel_futures=True)

    async def _start(self, request: GenerationInput) -> Generation:
        model = self.models.get(clean_text(request.model))
        options = check_options(request, model, self.settings, lambda: secrets.randbits(64))
        check_prompt_lengths(request, options, model)
        prompts = await self.encode(request.prompts, model)
        requests = sequence_requests(request, options, prompts, model, self.settings)
        num_echoed = sum(map(len, prompts)) if options.echo else 0
        outputs = await self.text_work(num_echoed, lambda: choice_outputs(request, options, requests, model))
        if self.clock() >= options.deadline_s:
            raise PdserveError(ErrorReason.DEADLINE_EXCEEDED, "the deadline passed before the request was queued")
        streams = self._scheduler.submit(requests)
        return Generation(model, outputs, streams, len(prompts))

    def _record(self, request: GenerationInput, generation: Generation | None, outcome: str) -> None:
        if self._observer is None:
            return
        known = {model.info.name for model in self.models}
        self._observer.generation_ended(
            GenerationRecord(
                model=generation.model.info.name if generation else request.model if request.model in known else "",
                outcome=outcome,
                prompt_tokens=generation.num_prompt_tokens if generation else 0,
                completion_tokens=generation.num_completion_tokens if generation else 0,
                duration_s=self.clock() - request.arrival_s,
            )
        )
