"""What the engine thread tells the service after each turn of its loop."""

from dataclasses import dataclass

from pdserve.core.errors import PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.sampling import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds a sequence spent on this worker."""

    queue_s: float = 0.0
    compute_s: float = 0.0
    exposed_transfer_s: float = 0.0
    transfer_s: float = 0.0
    transfer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TokenSampled:
    """Output token number `index` (0-based over the request's output); `finish_reason` set if it is the last.

    `prompt_logprobs`, of the prompt's tokens from the second on, and `num_cached_tokens`, of those that prefill did not
    compute, come with the token that prefill samples; the time that decode computed comes with its last one.
    """

    sequence_id: SequenceId
    index: int
    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    durations: Durations
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """The sequence ended here with an error. Its blocks may still be held: SequenceReleased tells."""

    sequence_id: SequenceId
    error: PdserveError


@dataclass(frozen=True, slots=True)
class SequenceTransferred:
    """Prefill only: the decode worker has committed the KV."""

    sequence_id: SequenceId
    durations: Durations


@dataclass(frozen=True, slots=True)
class SequenceReleased:
    """This stage holds nothing of the sequence any more. Always the last event about it, and always sent."""

    sequence_id: SequenceId


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """What a stage holds at the end of a turn, for other threads to read."""

    num_waiting: int = 0
    num_running: int = 0
    num_transferring: int = 0
    num_queued_tokens: int = 0
    num_running_tokens: int = 0


Event = TokenSampled | SequenceFailed | SequenceTransferred | SequenceReleased
