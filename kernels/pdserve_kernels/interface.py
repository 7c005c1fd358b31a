"""What a device must be able to compute for the engine. Owns no memory and knows no model and no scheduler.

Notation: N rows (tokens of all chunks, then padding), H hidden size, D head dim. The KV pool is a tensor
[num_blocks, num_layers, 2, num_kv_heads, block_size, D]: K then V.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

LinearOp = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The chunks of one step. Chunk i's rows follow chunk i−1's; rows past the last chunk's are padding.

    `query_lens[i]` tokens end at position `context_lens[i]` − 1 of a sequence whose position p lies in block
    `block_tables[i][p // block_size]`, slot `p % block_size`.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    num_rows: int

    @property
    def num_query_rows(self) -> int:
        """Rows that are no padding."""
        return sum(self.query_lens)


class PagedStep(Protocol):
    """The paged cache as one step sees it. For each layer: first `write_kv`, then `attend`."""

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Put every row's key and value, [N, num_kv_heads, D], into its slot; padding rows are dropped."""
        ...

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Causal attention of every row over its sequence's cache up to and with itself.

        `query` is fp32 [N, num_heads, D], scores are query · key · `scale`; with a `window`, a row at position p sees
        positions p − window + 1 to p only. The result is fp32 [N, num_heads · D], zero in padding rows. Slots that
        were never written take no part, whatever bits they hold.
        """
        ...


class Kernels(Protocol):
    """Compute primitives. Every row's result has the same bits whatever the other rows are, if N is a multiple of
    `row_multiple`; where a device cannot promise that, its class says so."""

    @property
    def row_multiple(self) -> int: ...

    @property
    def numerics_version(self) -> str:
        """A name of the arithmetic; whoever changes a bit changes it."""
        ...

    @property
    def workspace_bytes(self) -> int:
        """Upper bound of what `attend` allocates on the side, its result apart."""
        ...

    def linear(self, weight: Tensor, bias: Tensor | None) -> LinearOp:
        """x [N, in] → x · weightᵀ + bias, [N, out], in the weight's dtype; may repack the weight once, here."""
        ...

    def logits(self, weight: Tensor) -> LinearOp:
        """x fp32 [N, H] → fp32 [N, vocab]: products of the exact weights, accumulated and returned in fp32."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """fp32 [N, …, H] → the same shape: x / sqrt(mean(x²) + eps) · weight, weight fp32 [H]."""
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the halves of each head: x [N, heads, D], cos and sin fp32 [N, D / 2] → fp32 [N, heads, D]."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[N, 2F], gate then up → silu(gate) · up, [N, F], computed in fp32, in the input's dtype."""
        ...

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """As `silu_mul` with GELU in its tanh form: 0.5 · g · (1 + tanh(√(2/π) · (g + 0.044715 · g³))) · up."""
        ...

    def begin(self, batch: RaggedBatch, kv_pool: Tensor) -> PagedStep: ...
