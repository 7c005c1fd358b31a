"""What the coordinator knows of a worker and says to it, as plain values; protobuf stays in worker_messages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pdserve.core.errors import PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.model_info import KvLayout, ModelInfo
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import FinishReason, TokenLogprobs
from pdserve.serving.load import TransportTotals


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(Enum):
    """READY gets new work; the others get none, and finish what they have unless LOST."""

    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    STALLED = "stalled"
    LOST = "lost"


@dataclass(frozen=True, slots=True, order=True)
class WorkerKey:
    """One run of one worker: `worker_id` is stable across restarts, `incarnation` is not."""

    worker_id: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.worker_id}@{self.incarnation:016x}"


@dataclass(frozen=True, slots=True)
class Capacity:
    """`num_blocks` usable KV blocks of `block_size` tokens."""

    num_blocks: int
    block_size: int
    max_batch_size: int = 0
    token_budget: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A registration. `transports` and `kv_layouts` are in the worker's order of preference."""

    key: WorkerKey
    roles: frozenset[Role]
    model_name: str
    model: ModelInfo
    kv_layouts: tuple[KvLayout, ...]
    transports: tuple[str, ...]
    control_address: str
    kv_address: str
    host: str
    capacity: Capacity
    labels: Mapping[str, str]
    protocol_version: int
    roles_epoch: int = 0

    @property
    def pool_name(self) -> str:
        """ "prefill", "decode", or "colocated" for both."""
        return "colocated" if len(self.roles) > 1 else next(iter(self.roles)).value

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for_tokens(num_tokens, self.capacity.block_size)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A load report, as far as decisions and metrics need it.

    `prefix_queries` and `prefix_hits` count prompt tokens since the worker started: looked up in its prefix index, and
    found there. `transports`: by name, the KV that it sent.
    """

    ledger_version: int
    step_count: int
    has_work: bool
    draining: bool
    queued_prefill_tokens: int
    num_waiting: int
    num_running: int
    num_transferring: int
    num_free_blocks: int
    num_reserved_blocks: int
    num_usable_blocks: int
    num_cached_blocks: int
    prefix_queries: int = 0
    prefix_hits: int = 0
    transports: Mapping[str, TransportTotals] = field(default_factory=dict[str, TransportTotals])


@dataclass(frozen=True, slots=True)
class Granted:
    reservation_id: int
    num_blocks: int
    num_cached_blocks: int


@dataclass(frozen=True, slots=True)
class Denied:
    """Not now (a retry is pointless before the ledger's version passes `ledger_version`), or `never_fits`."""

    needed: int
    free: int
    ledger_version: int
    never_fits: bool


@dataclass(frozen=True, slots=True)
class Target:
    """Where a prefill worker sends a sequence's KV."""

    worker: WorkerInfo
    kv_layout: KvLayout
    transport: str
    reservation_id: int
    num_cached_blocks: int


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """News of one sequence: output tokens from `first_index` on, its end, or (prefill) that its KV was committed."""

    sequence_id: SequenceId
    first_index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: PdserveError | None = None
    transferred: bool = False
    exposed_transfer_s: float = 0.0
    num_cached_tokens: int = 0
