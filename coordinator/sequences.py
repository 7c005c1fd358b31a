"""The seam between text (APIs, tokenizer) and scheduling: sequences of token ids in, streams of token ids out.

A sequence's automaton (`SequencePhase`), and who owns it in each phase:

    QUEUED ──► RESERVING ──► PREFILL ──► DECODE ──► ENDED
    queue      dispatcher    prefill     decode     nobody
                             worker      worker
"""

from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from pdserve.core.ids import SequenceId
from pdserve.core.sampling import FinishReason, SamplingParams, TokenLogprobs


class SequencePhase(Enum):
    """One member a phase boundary; timings and metrics use only these names."""

    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """A validated sequence. `arrival_s` and `deadline_s` are readings of `time.monotonic`.

    Cached prefixes are shared where `cache_salt` is equal; the tenant is part of it.
    """

    model: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    deadline_s: float
    tenant: str = "default"
    request_class: str = "default"
    adapter: str = ""
    cache_salt: str = ""
    label: str = ""
    traceparent: str = ""

    @property
    def num_tokens_max(self) -> int:
        return len(self.token_ids) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class SequenceTimings:
    """Seconds per phase; TTFT = queue + reserve + prefill. Worker names are empty where none was needed."""

    queue_s: float = 0.0
    reserve_s: float = 0.0
    prefill_s: float = 0.0
    exposed_transfer_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    prefill_worker: str = ""
    decode_worker: str = ""


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Output tokens `first_index`, `first_index` + 1, …: each index comes exactly once and in order.

    `logprobs`, if asked for, are in step with `token_ids`. With index 0 come `prompt_logprobs`, of the prompt's tokens
    from the second on, and how many of its tokens were cached.
    """

    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """The last event of a stream that did not fail."""

    finish_reason: FinishReason
    timings: SequenceTimings
    num_cached_tokens: int = 0


class SequenceStream(Protocol):
    """One sequence's events: TokenDelta any number of times, then one SequenceEnd; or PdserveError is raised."""

    @property
    def id(self) -> SequenceId: ...

    def __aiter__(self) -> AsyncIterator[TokenDelta | SequenceEnd]: ...

    def cancel(self) -> None:
        """Stop and free everything, in whatever phase; harmless after the end."""
        ...

    def timings(self) -> SequenceTimings:
        """As far as they are known now."""
        ...


class SequenceScheduler(Protocol):
    """What the APIs need of the rest of the coordinator."""

    def submit(self, requests: Seq[SequenceRequest]) -> list[SequenceStream]:
        """Queue all or none.

        Raises:
            PdserveError: QUEUE_FULL, NO_WORKERS, DRAINING, NEVER_FITS; nothing is left behind.
        """
        ...

    def is_ready(self, model: str) -> bool:
        """Whether at least one live worker of each role serves the model."""
        ...
