# pyright: basic
"""How fast the processor's time-stamp counter runs."""

import time
from functools import cache

from numba import njit

from pdserve_kernels.cpu.compiled import JIT
from pdserve_kernels.cpu.simd import cycles

_MEASURED_S = 0.05


@njit(**JIT)
def _now():
    return cycles()


@cache
def ticks_per_second() -> float:
    """Measured once, against the clock."""
    _now()
    begin, begin_ticks = time.perf_counter(), _now()
    time.sleep(_MEASURED_S)
    return float(_now() - begin_ticks) / (time.perf_counter() - begin)
