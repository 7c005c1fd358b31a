"""What the machine can do at best: bytes read and products a second, with the threads and cores of this process."""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from pdserve_bench.engine.costs import ModelCosts
from pdserve_bench.engine.results import Limits
from pdserve_bench.foreign_cpu import quietest

READ_BYTES = 256 << 20
"""Far more than any cache."""
SQUARE = 2048
MODEL_ROWS = 512
NUM_TRIES = 5


def measure_limits(costs: ModelCosts, dtype: torch.dtype, max_tries: int) -> Limits:
    """Of this moment; tried again while others disturb."""
    measured = quietest(lambda: (read_rate(), square_rate(dtype), model_rate(costs, dtype)), max_tries)
    return Limits(*measured.value, measured.foreign_cores)


def read_rate(num_bytes: int = READ_BYTES) -> float:
    """Bytes a second of a sum over a large buffer."""
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32)
    return num_bytes / best_s(buffer.sum)


def square_rate(dtype: torch.dtype, size: int = SQUARE) -> float:
    """FLOP a second of torch's product of two square matrices."""
    return 2 * size**3 / _product_s(size, size, size, dtype)


def model_rate(costs: ModelCosts, dtype: torch.dtype, num_rows: int = MODEL_ROWS) -> float:
    """FLOP a second of torch's products with one layer's matrices."""
    shapes = costs.layer_matrices()
    total_s = sum(_product_s(num_rows, out, width, dtype) for out, width in shapes)
    return sum(2 * num_rows * out * width for out, width in shapes) / total_s


def _product_s(num_rows: int, out: int, width: int, dtype: torch.dtype) -> float:
    x, weight = torch.randn(num_rows, width).to(dtype), torch.randn(out, width).to(dtype)
    return best_s(partial(F.linear, x, weight))


@torch.inference_mode()
def best_s(call: Callable[[], object], num_tries: int = NUM_TRIES) -> float:
    """The shortest of several calls, after one that does not count."""
    call()
    times_s: list[float] = []
    for _ in range(num_tries):
        begin_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - begin_s)
    return min(times_s)
