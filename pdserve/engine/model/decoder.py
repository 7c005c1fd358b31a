"""A decoder-only transformer from its config, operation by operation: on any device, and what faster ones must equal.

Knows nothing of requests, of files, or of architectures' names. The residual stream is fp32, as norms and rotation are;
GEMM inputs are in the load dtype. Rows are padded with token 0 up to what the kernels need for equal bits.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.core.model_files import ModelConfig
from pdserve.core.model_files.config import RopeConfig
from pdserve.engine.model.interface import Int32s, Profile, StepInput
from pdserve.engine.model.parameters import DecoderParameters, Projection
from pdserve.engine.model.rope import RopeTable, rope_table, rope_table_bytes
from pdserve_kernels.interface import Kernels, LinearOp, PagedStep, RaggedBatch


@dataclass(frozen=True, slots=True)
class _LayerOps:
    qkv: LinearOp
    attention_out: LinearOp
    gate_up: LinearOp
    down: LinearOp


class DecoderModel:
    """See `interface.Model`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self._parameters = DecoderParameters(config, dtype, device)
        self._gate = kernels.silu_mul if config.activation == "silu" else kernels.gelu_tanh_mul
        self._ops: list[_LayerOps] = []
        self._rope: dict[RopeConfig, RopeTable] = {}
        self._logits: LinearOp | None = None
        self._hidden: Tensor | None = None

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def numerics_version(self) -> str:
        return self._kernels.numerics_version

    @property
    def kv_inner_order(self) -> str:
        return "slot_dim"

    @property
    def weight_bytes(self) -> int:
        """All parameters, a table for each kind of rotation, and the exact fp32 copy of the head that logits need."""
        config = self._config
        num_tables = len({attention.rope for attention in config.attention})
        exact_head = 4 * config.vocab_size * config.hidden_size if self._dtype != torch.float32 else 0
        tables = num_tables * rope_table_bytes(config.head_dim, config.context_length)
        return self._parameters.num_bytes + tables + exact_head

    def workspace_bytes(self, num_rows: int, num_samples: int) -> int:
        """fp32: residual, norm and q/k/v/out rows, gate and up with their product; logits; attention's share."""
        config = self._config
        widths = 4 * config.hidden_size + 6 * config.num_heads * config.head_dim + 5 * config.intermediate_size
        return 4 * (num_rows * widths + num_samples * config.vocab_size) + self._kernels.workspace_bytes

    def destinations(self) -> dict[str, Tensor]:
        return self._parameters.destinations()

    def freeze(self) -> None:
        self._ops = [
            _LayerOps(
                self._linear(layer.qkv),
                self._linear(layer.attention_out),
                self._linear(layer.gate_up),
                self._linear(layer.down),
            )
            for layer in self._parameters.layers
        ]
        self._rope = {rope: self._table(rope) for rope in {attention.rope for attention in self._config.attention}}
        self._logits = self._kernels.logits(self._parameters.head)

    @torch.inference_mode()
    def forward(self, step: StepInput, kv_pool: Tensor) -> NDArray[np.float32]:
        if not self._ops:
            raise RuntimeError("forward before freeze")
        token_ids, positions = self._padded(step.token_ids), self._padded(step.positions)
        paged_step = self._kernels.begin(_ragged(step, len(token_ids)), kv_pool)
        residual = self._parameters.embedding[token_ids].float() * self._config.embedding_scale
        rotations = {rope: table.rows(positions) for rope, table in self._rope.items()}
        for index, (layer, ops) in enumerate(zip(self._parameters.layers, self._ops, strict=True)):
            qkv = ops.qkv(self._norm(residual, layer.attention_norm).to(self._dtype))
            rotation = rotations[self._config.attention[index].rope]
            attended = ops.attention_out(self._attend(paged_step, index, qkv, rotation).to(self._dtype))
            residual += self._norm_if(attended, layer.attention_out_norm)
            gate_up = ops.gate_up(self._norm(residual, layer.mlp_norm).to(self._dtype))
            residual += self._norm_if(ops.down(self._gate(gate_up)), layer.down_norm)
        self._hidden = residual
        logits = self.logits(step.sample_rows)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return logits

    @torch.inference_mode()
    def logits(self, rows: Int32s) -> NDArray[np.float32]:
        if self._logits is None or self._hidden is None:
            raise RuntimeError("logits before forward")
        if len(rows) == 0:
            return np.zeros((0, self._config.vocab_size), dtype=np.float32)
        hidden = self._hidden[self._padded(rows)]
        logits = self._logits(self._norm(hidden, self._parameters.final_norm))
        found: NDArray[np.float32] = logits[: len(rows)].cpu().numpy()
        return found

    def profile(self) -> Profile | None:
        return None

    def _attend(self, step: PagedStep, index: int, qkv: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        config, layer = self._config, self._parameters.layers[index]
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        query, key, value = heads.split_with_sizes((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        query = self._kernels.rope(self._norm_if(query, layer.query_norm), *rotation)
        key = self._kernels.rope(self._norm_if(key, layer.key_norm), *rotation)
        step.write_kv(index, key, value)
        return step.attend(index, query, config.attention_scale, config.attention[index].window)

    def _padded(self, values: Int32s) -> Tensor:
        """int64 on the device, zeros behind."""
        multiple = self._kernels.row_multiple
        padded = np.zeros(-(-len(values) // multiple) * multiple, dtype=np.int64)
        padded[: len(values)] = values
        return torch.from_numpy(padded).to(self._device)

    def _norm_if(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._norm(x.float(), weight)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, weight, self._config.rms_norm_eps)

    def _linear(self, projection: Projection) -> LinearOp:
        return self._kernels.linear(projection.weight, projection.bias)

    def _table(self, rope: RopeConfig) -> RopeTable:
        config = self._config
        table = rope_table(rope, config.head_dim, config.context_length, self._parameters.rope_factors)
        return RopeTable(table.cos.to(self._device), table.sin.to(self._device))


def _ragged(step: StepInput, num_rows: int) -> RaggedBatch:
    return RaggedBatch(
        query_lens=tuple(step.query_lens.tolist()),
        context_lens=tuple(step.context_lens.tolist()),
        block_tables=tuple(tuple(table.ids.tolist()) for table in step.block_tables),
        num_rows=num_rows,
    )
