"""Another process's pool, mapped to read."""

import fcntl
import mmap
import os

import numpy as np

from kv_transfer.messages import broken


class PeerMemory:
    """Blocks of `block_bytes` bytes each, one after another, in the file `fd`, which the caller closes. Unmapped once
    the last block that was taken is dropped.

    Raises:
        PdserveError: TRANSFER_FAILED: it cannot be mapped, or might be cut off under the reader's hands.
    """

    def __init__(self, fd: int, block_bytes: int) -> None:
        size = os.fstat(fd).st_size
        if size == 0 or size % block_bytes:
            raise broken(f"a pool of {size} bytes does not hold blocks of {block_bytes}")
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise broken("the pool's file could be cut off while it is read")
            # Populated at once: a page fault for every 4 KiB would double the first reads' time.
            area = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        except OSError as error:
            raise broken(f"the pool's file cannot be mapped: {error}") from error
        self._blocks = np.frombuffer(area, dtype=np.uint8).reshape(-1, block_bytes)

    def block(self, block_id: int) -> memoryview:
        """Raises:
        PdserveError: TRANSFER_FAILED: there is no such block.
        """
        if block_id >= len(self._blocks):
            raise broken(f"block {block_id} is none of the sender's {len(self._blocks)}")
        return memoryview(self._blocks[block_id].data)
