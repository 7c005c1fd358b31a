"""What every worker is made of, whatever its roles: identity, loaded model, pool, ledger. Starts nothing."""

import os
import socket
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from pdserve.core.block_keys import PrefixScope
from pdserve.core.errors import PdserveError
from pdserve.core.ids import new_incarnation
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.events import Event, StageSnapshot
from pdserve.engine.interfaces import Stage
from pdserve.engine.ledger import ReservationLedger
from pdserve.engine.loading import LoadedEngine
from pdserve.engine.step_loop import EngineThread, StageResources, Turn
from pdserve.serving.load import StageLoad
from pdserve.serving.settings import Settings


class StageService(Protocol):
    """The RPC side of one stage, on the event loop."""

    @property
    def num_requests(self) -> int:
        """Requests that hold anything here."""
        ...

    def handle_turn(self, events: Seq[Event], snapshot: StageSnapshot) -> None: ...
    def load(self) -> StageLoad: ...
    def reap(self, now_s: float) -> None: ...
    def fail_all(self, error: PdserveError) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """Ready-made parts for a role to put together.

    `publish`, `on_crash` and `announce` connect the engine thread and the services to the worker's process: a turn's
    events, the engine's end, and "the load has changed".
    """

    settings: Settings
    worker_id: str
    incarnation: int
    loaded: LoadedEngine
    pool: BlockPool
    ledger: ReservationLedger
    resources: StageResources
    publish: Callable[[Turn], None]
    on_crash: Callable[[BaseException], None]
    announce: Callable[[], None]

    def engine(self, stages: Seq[Stage]) -> EngineThread:
        return EngineThread(self.loaded.runner, stages, self.publish, self.on_crash)


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker put together. `services` are in the order of the engine's stages; `transports`: how it can send KV, or
    receive it."""

    engine: EngineThread
    services: tuple[StageService, ...]
    add_to_server: Callable[[grpc.aio.Server], None]
    kv_port: int
    transports: tuple[str, ...]
    close: Callable[[], None]


def make_parts(
    settings: Settings,
    loaded: LoadedEngine,
    role: str,
    publish: Callable[[Turn], None],
    on_crash: Callable[[BaseException], None],
    announce: Callable[[], None],
) -> WorkerParts:
    layout, num_blocks = loaded.paged_kv.layout, loaded.paged_kv.num_blocks
    pool = BlockPool(num_blocks, threading.Lock())
    eos_token_ids = frozenset(loaded.model_info.eos_token_ids)
    return WorkerParts(
        settings=settings,
        worker_id=settings.worker.worker_id or f"{role}-{socket.gethostname()}-{os.getpid()}",
        incarnation=new_incarnation(),
        loaded=loaded,
        pool=pool,
        ledger=ReservationLedger(num_blocks, layout.block_size, settings.worker.lease_s),
        resources=StageResources(pool, layout.block_size, eos_token_ids, prefix_scope(settings, loaded)),
        publish=publish,
        on_crash=on_crash,
        announce=announce,
    )


def prefix_scope(settings: Settings, loaded: LoadedEngine) -> PrefixScope | None:
    """What all cached KV of this worker depends on; None if none is to be cached."""
    if not settings.worker.prefix_cache:
        return None
    return PrefixScope(loaded.model_info.fingerprint, loaded.paged_kv.layout, loaded.model_info.evaluation_id)
