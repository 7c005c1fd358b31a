"""The receiving side as a decode service uses it: every transport's door, one set of transfers, one reaper."""

import logging
import threading
import time

from kv_transfer.inbound.desk import Desk
from kv_transfer.inbound.registry import InboundStats
from kv_transfer.inbound.transfers import InboundTransfers
from kv_transfer.interfaces import InboundHost
from kv_transfer.messages import WorkerIdentity
from kv_transfer.over_grpc.door import GrpcDoor
from kv_transfer.over_shm.door import ShmDoor
from pdserve.client.channels import KEEPALIVE, Keepalive
from pdserve.engine.interfaces import BlockStore
from pdserve.serving.settings import TransferSettings

logger = logging.getLogger(__name__)

REAP_INTERVAL_S = 0.25


class KvReceiver:
    """Receives KV for one decode worker. `start`, then `close`; every other method is for any thread.

    Args:
        with_shm: whether senders on this host may have their memory read; `store` lies in host memory.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        model_fingerprint: str,
        store: BlockStore,
        host: InboundHost,
        settings: TransferSettings,
        *,
        with_shm: bool = False,
        keepalive: Keepalive = KEEPALIVE,
    ) -> None:
        self._transfers = InboundTransfers(host, store, settings.lease_s)
        desk = Desk(identity, model_fingerprint, store.layout, self._transfers)
        self._grpc = GrpcDoor(desk, keepalive)
        self._shm = ShmDoor(desk) if with_shm else None
        self._stopping = threading.Event()
        self._reaper = threading.Thread(target=self._reap, name="kv-reaper", daemon=True)

    @property
    def transports(self) -> tuple[str, ...]:
        """Those that senders may use."""
        return ("shm", "grpc") if self._shm is not None else ("grpc",)

    def start(self, host: str, port: int) -> int:
        """Listen on host:port (0 picks one) and return the port.

        Raises:
            OSError: the address cannot be bound.
        """
        bound = self._grpc.open(host, port)
        if self._shm is not None:
            self._shm.open()
        self._reaper.start()
        return bound

    def cancel(self, reservation_id: int, reason: str = "the request was cancelled") -> bool:
        """End the transfer into a reservation; false if there is none, or `host.commit` has been called for it.

        `host.release` runs inside this call, or later from a receiver thread that is still writing.
        """
        return self._transfers.cancel(reservation_id, reason)

    @property
    def stats(self) -> InboundStats:
        return self._transfers.stats

    def close(self, grace_s: float = 1.0) -> None:
        """Refuse new calls, give running ones `grace_s`, abort what is open; threads end as last writes return."""
        self._stopping.set()
        self._grpc.refuse(grace_s)
        if self._shm is not None:
            self._shm.close(grace_s)
        self._transfers.close()
        self._grpc.close()
        if self._reaper.is_alive():
            self._reaper.join()

    def _reap(self) -> None:
        while not self._stopping.wait(REAP_INTERVAL_S):
            expired = self._transfers.reap(time.monotonic())
            if expired:
                logger.warning(
                    "gave up %d inbound transfers whose sender fell silent or whose deadline passed", expired
                )
