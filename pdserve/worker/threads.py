"""What a worker says of the threads it computes with. Sizing the pools and pinning come before torch is imported."""

import os
import sys
from typing import Any

import torch


def describe_threads() -> str:
    """The pools' sizes and the cores of this process, as in "compute threads: torch 1, numba 1; cores 0"."""
    pools = {"torch": torch.get_num_threads()}
    numba: Any = sys.modules.get("numba")  # only where kernels use it: importing it takes half a second
    if numba is not None:
        pools["numba"] = numba.get_num_threads()
    cores = ", ".join(map(str, sorted(os.sched_getaffinity(0)))) if hasattr(os, "sched_getaffinity") else "any"
    return f"compute threads: {', '.join(f'{name} {size}' for name, size in pools.items())}; cores {cores}"
