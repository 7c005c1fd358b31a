"""The receiving process: a KV receiver as a decode worker has it, and the limits' other halves. Ends with its stdin.

python -m pdserve_bench.transfer.receiver CORE NUM_BLOCKS MAX_BYTES  →  one line of JSON: ports and addresses
"""

import json
import os
import sys
import threading
from collections.abc import Sequence as Seq

import torch

from kv_transfer.interfaces import InboundCommit, InboundGrant
from kv_transfer.receiver import KvReceiver
from pdserve.core.errors import PdserveError
from pdserve.core.ids import SequenceId, new_incarnation
from pdserve.engine.paged_kv import PagedKv
from pdserve.serving.settings import TransferSettings
from pdserve_bench.transfer import parties
from pdserve_bench.transfer.limits import serve_shm, serve_tcp


class EagerHost:
    """Gives blocks to whoever asks, and takes them back with the commit: nothing is decoded here."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks))
        self._lock = threading.Lock()

    def allocate(self, sequence_id: SequenceId, reservation_id: int, num_blocks: int) -> InboundGrant:
        with self._lock:
            granted, self._free = self._free[:num_blocks], self._free[num_blocks:]
            return InboundGrant(tuple(granted))

    def commit(self, commit: InboundCommit) -> None:
        with self._lock:
            self._free += commit.block_ids

    def release(self, sequence_id: SequenceId, reservation_id: int, block_ids: Seq[int], error: PdserveError) -> None:
        with self._lock:
            self._free += block_ids


def main(core: int, num_blocks: int, max_bytes: int) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    incarnation = new_incarnation()
    identity, host = parties.receiver(incarnation), EagerHost(num_blocks)
    store = PagedKv(parties.LAYOUT, num_blocks, torch.device("cpu"))
    receiver = KvReceiver(identity, parties.FINGERPRINT, store, host, TransferSettings(), with_shm=True)
    address = f"\0pdserve-bench-{incarnation:016x}"
    serve_shm(address, max_bytes)
    found = {
        "incarnation": incarnation,
        "kv_port": receiver.start("127.0.0.1", 0),
        "tcp_port": serve_tcp(max_bytes),
        "shm_address": address,
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    receiver.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
