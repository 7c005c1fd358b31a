"""How loaded a worker is, as plain values, and as the report it sends to coordinators."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Self

from pdserve.v1 import fleet_pb2


@dataclass(frozen=True, slots=True)
class TransportTotals:
    """Transfers of KV that were sent over one transport, and what they moved. `seconds`: from begin to end, each."""

    num_completed: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class ByTransport:
    totals: Mapping[str, TransportTotals] = field(default_factory=dict[str, TransportTotals])

    def __add__(self, other: Self) -> Self:
        both = {**self.totals, **other.totals}
        nothing = TransportTotals()
        return type(self)({t: self.totals.get(t, nothing) + other.totals.get(t, nothing) for t in both})

    def to_proto(self) -> list[fleet_pb2.TransportTotals]:
        return [fleet_pb2.TransportTotals(transport=name, **asdict(totals)) for name, totals in self.totals.items()]


@dataclass(frozen=True, slots=True)
class WorkerTotals:
    """Counts since the worker started; field names are those of the protobuf message.

    `prefix_queries` and `prefix_hits` are tokens: looked up in the prefix cache, and found there.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefills_completed: int = 0
    decodes_completed: int = 0
    transfers_completed: int = 0
    transfers_failed: int = 0
    transferred_bytes: int = 0
    cancelled: int = 0
    failed: int = 0
    stale_events: int = 0
    preemptions: int = 0
    nan_rows: int = 0
    exposed_transfer_s: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    transports: ByTransport = ByTransport()

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What one stage of a worker holds now. A colocated worker adds its two."""

    queued_prefill_tokens: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_transferring: int = 0
    num_running_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    totals: WorkerTotals = WorkerTotals()

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """The KV pool and the ledger over it. `num_free_blocks` are empty; cached are those of prefixes nobody uses."""

    num_free_blocks: int
    num_reserved_blocks: int
    num_usable_blocks: int
    ledger_version: int
    num_cached_blocks: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Everything a load report says, but for who sends it."""

    stage: StageLoad
    pool: PoolLoad
    step_count: int
    has_work: bool
    draining: bool = False
    model_load_s: float = 0.0

    def to_proto(self) -> fleet_pb2.LoadReport:
        stage, pool = self.stage, self.pool
        counts = {f.name: getattr(stage.totals, f.name) for f in fields(stage.totals) if f.name != "transports"}
        totals = fleet_pb2.WorkerTotals(**counts, transports=stage.totals.transports.to_proto())
        return fleet_pb2.LoadReport(
            ledger_version=pool.ledger_version,
            step_count=self.step_count,
            has_work=self.has_work,
            draining=self.draining,
            queued_prefill_tokens=stage.queued_prefill_tokens,
            num_waiting=stage.num_waiting,
            num_running=stage.num_running,
            num_transferring=stage.num_transferring,
            num_running_tokens=stage.num_running_tokens,
            num_free_blocks=pool.num_free_blocks,
            num_reserved_blocks=pool.num_reserved_blocks,
            num_usable_blocks=pool.num_usable_blocks,
            num_cached_blocks=pool.num_cached_blocks,
            num_cached_tokens=pool.num_cached_tokens,
            prefill_tokens_per_s=stage.prefill_tokens_per_s,
            decode_tokens_per_s=stage.decode_tokens_per_s,
            model_load_s=self.model_load_s,
            totals=totals,
        )
