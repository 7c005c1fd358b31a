"""Sampling parameters as workers receive them: final and checked. What they do: engine/sampler."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

GREEDY_BELOW = 1e-5
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 2**18
"""Logprobs of prompts, a token's own and its top ones, that one request may ask for: some 3 MB on the wire."""
MAX_OUTPUT_LOGPROBS = 2**20
"""The same of outputs: some 100 MB of JSON, in an answer that is not streamed."""


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence's tokens are chosen and when it ends.

    `max_tokens` ≥ 1 counts all output tokens of the sequence. `top_k` 0 is off. `seed` is a u64. `choice` is the index
    among n choices and part of the random counter.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    min_tokens: int = 0
    seed: int = 0
    choice: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw-logit logprob of the token at one position, and of the `top` ones as (token id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def finish_reason_after(
    token_id: int, num_output_tokens: int, params: SamplingParams, eos_token_ids: frozenset[int]
) -> FinishReason | None:
    """Whether a sequence ends with the token just sampled, the `num_output_tokens`-th of its output (1-based)."""
    if token_id in params.stop_token_ids:
        return FinishReason.STOP
    if not params.ignore_eos and token_id in eos_token_ids:
        return FinishReason.STOP
    if num_output_tokens >= params.max_tokens:
        return FinishReason.LENGTH
    return None
