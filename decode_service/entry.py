"""What the decode stage keeps of each sequence, and counts over all of them."""

from dataclasses import dataclass, field

from kv_transfer.interfaces import InboundCommit
from pdserve.core.block_keys import COMMON_GROUP, PrefixGroup
from pdserve.core.ids import SequenceId
from pdserve.core.sampling import SamplingParams
from pdserve.engine.block_pool import Owner, OwnerKind
from pdserve.engine.cached_prefix import CachedPrefix
from pdserve.engine.events import Durations
from pdserve.engine.sequence import Sequence


@dataclass(slots=True)
class DecodeTotals:
    """Since the worker started. `compute_s`: the time of the steps that sampled any of `num_tokens`.

    `num_prefix_queries` and `num_prefix_hits` are tokens: those of prompts that came by transfer, and those of them
    that were here already.
    """

    num_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_completed: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_stale: int = 0
    num_nan_rows: int = 0
    exposed_transfer_s: float = 0.0
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """What a coordinator submits: the ids that prefill computes, and how to go on. `num_blocks` is what is reserved.

    `group`: whose KV it may share.
    """

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    deadline_s: float
    num_blocks: int
    group: PrefixGroup = COMMON_GROUP


@dataclass(slots=True, eq=False)
class Entry:
    """What is known of a sequence so far. `block_ids`, from the commit on: those pinned here, then those that came."""

    sequence_id: SequenceId
    job: DecodeJob | None = None
    commit: InboundCommit | None = None
    block_ids: list[int] = field(default_factory=list[int])
    prefix: CachedPrefix | None = None
    committed_s: float = 0.0
    sequence: Sequence | None = None
    joined_s: float = 0.0
    durations: Durations = field(default_factory=Durations)
    owner: Owner = field(init=False)

    def __post_init__(self) -> None:
        self.owner = Owner(OwnerKind.SEQUENCE, self.sequence_id)
