"""The decoder as one compiled CPU function: packs the weights, lays out buffers and rows, and calls the kernel.

Same model, parameters and results as `decoder.DecoderModel`, to rounding; knows nothing of requests or files.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.core.model_files import ModelConfig
from pdserve.core.model_files.config import RopeConfig
from pdserve.engine.model.interface import Int32s, Profile, StepInput
from pdserve.engine.model.native_rows import NativeRows
from pdserve.engine.model.parameters import DecoderParameters, LayerParameters, Projection
from pdserve.engine.model.rope import rope_table
from pdserve_kernels.cpu.attention import ARITHMETIC_DOT, ARITHMETIC_PAIRS
from pdserve_kernels.cpu.gemm import interleave_gate_up, pack
from pdserve_kernels.cpu.job import JOB, LAYER
from pdserve_kernels.cpu.program import ATTEND, GEMM, HAS_BF16_DOT, LOGITS, STEP, kv_inner_order
from pdserve_kernels.cpu.team import Team
from pdserve_kernels.cpu.ticks import ticks_per_second


@dataclass(frozen=True, slots=True)
class NativeLimits:
    """The most rows of one step, and the most rows of logits asked for at once."""

    max_rows: int
    max_samples: int


class NativeDecoderModel:
    """See `interface.Model`. `bf16_attention`: queries and weights are rounded to bf16, which is faster."""

    device = torch.device("cpu")

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        limits: NativeLimits,
        team: Team,
        *,
        bf16_attention: bool = False,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._limits = limits
        self._team = team
        self._bf16_attention = bf16_attention and dtype == torch.bfloat16 and HAS_BF16_DOT
        self._parameters: DecoderParameters | None = DecoderParameters(config, dtype, self.device)
        self._kept: list[Tensor | NDArray[np.void]] = []
        self._job = np.zeros(1, dtype=JOB)
        self._rows = NativeRows(config, limits.max_rows, team.num_threads)
        self._logits: NDArray[np.float32] = np.zeros((0, 0), dtype=np.float32)

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def numerics_version(self) -> str:
        dot = "dot" if HAS_BF16_DOT and self._dtype == torch.bfloat16 else "fma"
        return f"cpu-1/{dot}/{'bf16' if self._bf16_attention else 'fp32'}-attention"

    @property
    def kv_inner_order(self) -> str:
        return kv_inner_order

    @property
    def workspace_bytes(self) -> int:
        return self._team.num_threads * self._rows.scratch_bytes

    def destinations(self) -> dict[str, Tensor]:
        if self._parameters is None:
            raise RuntimeError("the weights are packed already")
        return self._parameters.destinations()

    def freeze(self) -> None:
        """Packs weights one by one and lets go of the loader's copies."""
        parameters, self._parameters = self._parameters, None
        if parameters is None:
            raise RuntimeError("the weights are packed already")
        self._set_sizes()
        self._set_embedding(parameters)
        self._set_layers(parameters)
        self._set_buffers()

    def forward(self, step: StepInput, kv_pool: Tensor) -> None:
        if self._parameters is not None:
            raise RuntimeError("forward before freeze")
        job = self._job[0]
        num_blocks, num_layers = kv_pool.shape[:2]
        job["pool"] = kv_pool.data_ptr()
        job["block_bytes"] = kv_pool.nbytes // num_blocks
        job["layer_bytes"] = kv_pool.nbytes // num_blocks // num_layers
        job["block_size"] = kv_pool.shape[4]
        self._rows.lay_out(step, job)
        self._team.run(STEP, self._job.ctypes.data)

    def logits(self, rows: Int32s) -> NDArray[np.float32]:
        job = self._job[0]
        if len(rows) > self._limits.max_samples:
            raise RuntimeError(f"{len(rows)} rows of logits, at most {self._limits.max_samples} at once")
        sample_rows = np.ascontiguousarray(rows, dtype=np.int32)
        job["num_samples"] = len(sample_rows)
        job["sample_rows"] = sample_rows.ctypes.data
        self._team.run(LOGITS, self._job.ctypes.data)
        return self._logits[: len(rows)]

    def profile(self) -> Profile:
        job, rate = self._job[0], ticks_per_second()
        return Profile(*(float(job[f"cycles_{name}"]) / rate for name in ("gemm", "attention", "other")))

    # --- once -----------------------------------------------------------------------------------------------------

    def _set_sizes(self) -> None:
        config, job = self._config, self._job[0]
        for name in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            job[name] = getattr(config, name)
        job["vocab_size"] = config.vocab_size
        job["activation"] = int(config.activation == "gelu_tanh")
        job["is_bf16"] = int(self._dtype == torch.bfloat16)
        job["attention"] = ARITHMETIC_DOT if self._bf16_attention else ARITHMETIC_PAIRS
        job["embedding_scale"], job["eps"] = config.embedding_scale, config.rms_norm_eps
        job["attention_scale"] = config.attention_scale
        job["num_threads"], job["barrier"] = self._team.num_threads, self._team.barrier
        job["gemm"], job["attend"] = GEMM, ATTEND
        job["thread_number"] = self._team.thread_number

    def _set_embedding(self, parameters: DecoderParameters) -> None:
        job = self._job[0]
        job["embedding"] = job["head"] = self._packed(parameters.embedding)
        if parameters.head is not parameters.embedding:
            job["head"] = self._packed(parameters.head)
        job["final_norm"] = self._keep(parameters.final_norm)

    def _set_layers(self, parameters: DecoderParameters) -> None:
        tables = self._rope_tables(parameters)
        layers = np.zeros(len(parameters.layers), dtype=LAYER)
        for index, attention in enumerate(self._config.attention):
            record = layers[index]
            self._set_layer(record, parameters.layers.pop(0))
            record["cos"], record["sin"] = tables[attention.rope]
            record["window"] = attention.window or 0
        self._kept.append(layers)
        self._job[0]["layers"] = layers.ctypes.data

    def _set_layer(self, record: np.void, layer: LayerParameters) -> None:
        gate_up = Projection(
            interleave_gate_up(layer.gate_up.weight),
            None if layer.gate_up.bias is None else interleave_gate_up(layer.gate_up.bias),
        )
        projections = {"qkv": layer.qkv, "attention_out": layer.attention_out, "gate_up": gate_up, "down": layer.down}
        for name, projection in projections.items():
            record[name] = self._packed(projection.weight)
            if projection.bias is not None:
                record[f"{name}_bias"] = self._keep(_padded_bias(projection.bias))
        for name in ("attention_norm", "query_norm", "key_norm", "attention_out_norm", "mlp_norm", "down_norm"):
            norm: Tensor | None = getattr(layer, name)
            record[name] = 0 if norm is None else self._keep(norm)

    def _rope_tables(self, parameters: DecoderParameters) -> dict[RopeConfig, tuple[int, int]]:
        config = self._config
        addresses: dict[RopeConfig, tuple[int, int]] = {}
        for rope in {attention.rope for attention in config.attention}:
            table = rope_table(rope, config.head_dim, config.context_length, parameters.rope_factors)
            addresses[rope] = (self._keep(table.cos), self._keep(table.sin))
        return addresses

    def _set_buffers(self) -> None:
        config, job, rows = self._config, self._job[0], max(self._limits.max_rows, self._limits.max_samples)
        heads = config.num_heads + 2 * config.num_kv_heads
        self._logits = np.zeros((self._limits.max_samples, config.vocab_size), dtype=np.float32)
        job["logits"] = self._logits.ctypes.data
        job["x_stride"] = 4 * _whole_vectors(max(config.hidden_size, config.num_heads * config.head_dim))
        job["x"] = self._buffer(rows * int(job["x_stride"]))
        job["residual"] = self._buffer(rows * 4 * config.hidden_size)
        job["qkv"] = self._buffer(rows * 4 * heads * config.head_dim)
        job["delta"] = self._buffer(rows * 4 * config.hidden_size if config.sandwich_norms else 0)
        job["gated"] = self._buffer(rows * 4 * _whole_vectors(config.intermediate_size))
        job["tickets"] = self._buffer(8 * config.num_layers)
        job["scratch_stride"] = self._rows.scratch_bytes
        job["scratch"] = self._buffer(self._team.num_threads * self._rows.scratch_bytes)

    def _buffer(self, num_bytes: int) -> int:
        return self._keep(torch.zeros(num_bytes + 64, dtype=torch.uint8))

    def _packed(self, weight: Tensor) -> int:
        return self._keep(pack(weight).data)

    def _keep(self, tensor: Tensor) -> int:
        """The address of what must live as long as the model."""
        contiguous = tensor.contiguous()
        self._kept.append(contiguous)
        return contiguous.data_ptr()


def _padded_bias(bias: Tensor) -> Tensor:
    """fp32, zeros behind, up to the columns of a packed weight."""
    padded = torch.zeros(-(-len(bias) // 32) * 32, dtype=torch.float32)
    padded[: len(bias)] = bias.float()
    return padded


def _whole_vectors(size: int) -> int:
    return -(-size // 16) * 16
