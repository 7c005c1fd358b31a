"""Host memory on huge pages: a page table walk for every 4 KiB costs a third of the bandwidth of scattered reads. And
memory that other processes may read.
"""

import fcntl
import mmap
import os
import sys
from contextlib import suppress

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20


def huge_empty(num_bytes: int) -> Tensor:
    """Zeroed bytes, uint8 [num_bytes], at least 64-byte aligned; on huge pages where the system gives them."""
    size = max(1, -(-num_bytes // _HUGE_PAGE)) * _HUGE_PAGE
    area = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        area.madvise(advice)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    offset = -whole.data_ptr() % _HUGE_PAGE
    return whole[offset : offset + num_bytes]


CAN_SHARE = sys.platform == "linux"
"""Whether `shared_empty` works here."""
_SEAL_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE of Linux 5.1, which the standard library does not name."""


def shared_empty(num_bytes: int) -> tuple[Tensor, int]:
    """Zeroed bytes, uint8 [num_bytes], page-aligned, and the descriptor (memfd_create(2)) of a file of as many bytes,
    through which another process may map them, to read only. The memory is gone with its last mapping and descriptor,
    however their owners end. The file can be neither shrunk, so that no reader ever meets SIGBUS, nor grown.

    Raises:
        OSError: there is no such memory.
    """
    fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        area = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    with suppress(OSError):  # a hint, which kernels without huge pages for shared memory refuse
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8), fd
