"""Host memory on huge pages: a page table walk for every 4 KiB costs a third of the bandwidth of scattered reads."""

import mmap

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
