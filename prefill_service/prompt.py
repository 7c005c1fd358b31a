"""What the prefill stage keeps of each prompt, and counts over all of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.interfaces import OutboundEnd, OutboundTransfer
from pdserve.core.block_keys import COMMON_GROUP, PrefixGroup
from pdserve.core.errors import ErrorReason
from pdserve.core.sampling import TokenLogprobs
from pdserve.engine.block_pool import Owner, OwnerKind
from pdserve.engine.cached_prefix import CachedPrefix
from pdserve.engine.sequence import Sequence
from pdserve.serving.load import TransportTotals


@dataclass(slots=True)
class PrefillTotals:
    """Since the worker started. `compute_s`: the time of the steps that computed any of `num_tokens`.

    `num_prefix_queries` and `num_prefix_hits` are tokens: those of the prompts that were looked up, and those found.
    `transfers`: by transport.
    """

    num_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_completed: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_stale: int = 0
    num_nan_rows: int = 0
    compute_s: float = 0.0
    transfers: dict[str, TransportTotals] = field(default_factory=dict[str, TransportTotals])

    def count_transfer(self, end: OutboundEnd) -> None:
        """One that was cancelled neither completed nor failed."""
        failed = end.error is not None and end.error.reason is not ErrorReason.CANCELLED
        one = TransportTotals(int(end.error is None), int(failed), end.num_bytes, end.duration_s)
        self.transfers[end.transport] = self.transfers.get(end.transport, TransportTotals()) + one


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """A prompt to compute. `open_transfer` starts its transfer (None: one token is wanted and no KV leaves).

    With `local` the transfer hands the blocks themselves, all of them, to the decode stage, which then owns them; what
    was pinned for the sequence is given up when it begins. Otherwise the first `num_cached_blocks` are not sent: the
    decode worker has them. `group`: whose KV it may share.
    """

    sequence: Sequence
    deadline_s: float
    arrival_s: float
    open_transfer: Callable[[], OutboundTransfer] | None
    local: bool = False
    num_cached_blocks: int = 0
    group: PrefixGroup = COMMON_GROUP


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt in the stage's hands, and how far it is."""

    job: PrefillJob
    prefix: CachedPrefix | None
    num_cached_tokens: int = 0
    transfer: OutboundTransfer | None = None
    transfer_ended: bool = False
    computing: bool = True
    num_sent_blocks: int = 0
    begin_s: float | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])

    @property
    def sequence(self) -> Sequence:
        return self.job.sequence

    @property
    def owner(self) -> Owner:
        return Owner(OwnerKind.SEQUENCE if self.computing else OwnerKind.OUTBOUND, self.sequence.id)
