"""One sequence as a worker computes it: ids, how far its KV reaches, and the blocks that hold it."""

from dataclasses import dataclass, field

from pdserve.core.ids import SequenceId
from pdserve.core.sampling import SamplingParams, TokenLogprobs
from pdserve.engine.block_table import BlockTable


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable; owned by the engine thread.

    `token_ids` is prompt + output. `num_computed_tokens` tokens have their KV in `block_ids` (position p lies in block
    `block_ids[p // block_size]`, slot `p % block_size`), which only grows while it is computed here; `block_table`
    follows it. Where `sampling.num_prompt_logprobs` is set, all tokens of the prompt must be computed here: such a
    sequence takes nothing from a prefix cache.
    """

    id: SequenceId
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: list[int] = field(default_factory=list[int])
    num_computed_tokens: int = 0
    block_table: BlockTable = field(default_factory=BlockTable)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of a sequence's tokens to compute in this step: the `num_tokens` from `sequence.num_computed_tokens` on.

    Its blocks must already be allocated. `sample` asks for a token after the chunk's last position, which must then be
    the sequence's last token.
    """

    sequence: Sequence
    num_tokens: int
    sample: bool


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token, or (`token_id` None) the news that the row's logits had a NaN or +inf and nothing was drawn."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What a chunk gave: the token sampled, None if none was asked for, and logprobs of prompt tokens, if those were.

    `prompt_logprobs` belong to the prompt tokens that follow the chunk's rows. A NaN or +inf in one of these rows is
    told as `Sampled(None)`, whether or not the chunk samples.
    """

    sampled: Sampled | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
