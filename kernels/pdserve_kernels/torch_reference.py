"""The kernels in plain torch, on any device: slow and simple, the definition that faster ones are compared with.

On CPU, with rows padded to `row_multiple`, results are bitwise equal whatever the batch: BLAS treats every row alike
from four rows up, and attention walks KV tiles at fixed positions.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve_kernels.interface import LinearOp, PagedStep, RaggedBatch
from pdserve_kernels.tile_plan import WORKSPACE_BYTES
from pdserve_kernels.torch_attention import TorchPagedStep


class TorchKernels:
    """See `interface.Kernels`."""

    row_multiple = 4
    numerics_version = "torch-1"
    workspace_bytes = WORKSPACE_BYTES

    def linear(self, weight: Tensor, bias: Tensor | None) -> LinearOp:
        return lambda x: F.linear(x, weight, bias)

    def logits(self, weight: Tensor) -> LinearOp:
        exact = weight.float()
        return lambda x: F.linear(x, exact)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True).add_(eps))
        return (x * scale).mul_(weight)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = x.float().chunk(2, dim=-1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return _gate_mul(gate, gate.neg(), up).to(gate_up.dtype)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        # (1 + tanh(y)) / 2 = 1 / (1 + exp(−2y))
        exponent = gate.square().mul_(0.044715).add_(1.0).mul_(gate).mul_(-2.0 * math.sqrt(2.0 / math.pi))
        return _gate_mul(gate, exponent, up).to(gate_up.dtype)

    def begin(self, batch: RaggedBatch, kv_pool: Tensor) -> PagedStep:
        return TorchPagedStep(batch, kv_pool, self.row_multiple)


def _gate_mul(gate: Tensor, exponent: Tensor, up: Tensor) -> Tensor:
    """gate / (1 + exp(exponent)) · up; takes `exponent` apart.

    Not by F.silu or F.gelu: their vectorised part and their tail differ in the last bit, so a value would depend on its
    place.
    """
    return exponent.exp_().add_(1.0).reciprocal_().mul_(gate).mul_(up)
