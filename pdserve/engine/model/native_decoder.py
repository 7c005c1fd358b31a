"""The decoder as one compiled CPU function: has the weights packed, lays out buffers and rows, and calls the kernel.

Same model, parameters and results as `decoder.DecoderModel`, to rounding; knows nothing of requests or files.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.core.model_files import ModelConfig
from pdserve.engine.model.area import Area, aligned
from pdserve.engine.model.interface import Int32s, Profile, StepInput
from pdserve.engine.model.native_rows import NativeRows
from pdserve.engine.model.packed_weights import PackedWeights, packed_weight_bytes
from pdserve.engine.model.parameters import DecoderParameters
from pdserve_kernels.cpu.attention import ARITHMETIC_DOT, ARITHMETIC_PAIRS
from pdserve_kernels.cpu.job import JOB
from pdserve_kernels.cpu.meeting import MEETING_BYTES
from pdserve_kernels.cpu.program import ATTEND, GEMM, HAS_BF16_DOT, LOGITS, STEP, kv_inner_order
from pdserve_kernels.cpu.team import Team
from pdserve_kernels.cpu.ticks import ticks_per_second

_SLACK_BYTES = 64


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
        self.weight_bytes = packed_weight_bytes(config, self._parameters)
        self._weights: PackedWeights | None = None
        self._buffers: Area | None = None
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

    def workspace_bytes(self, num_rows: int, num_samples: int) -> int:
        return sum(self._buffer_sizes(num_rows, num_samples).values())

    def destinations(self) -> dict[str, Tensor]:
        if self._parameters is None:
            raise RuntimeError("the weights are packed already")
        return self._parameters.destinations()

    def freeze(self) -> None:
        """Packs the weights and lets go of the loader's copies."""
        parameters, self._parameters = self._parameters, None
        if parameters is None:
            raise RuntimeError("the weights are packed already")
        self._set_sizes()
        self._weights = PackedWeights(self._config, parameters, self._job[0])
        self._set_buffers()

    def forward(self, step: StepInput, kv_pool: Tensor) -> NDArray[np.float32]:
        if self._parameters is not None:
            raise RuntimeError("forward before freeze")
        if len(step.token_ids) == 0:
            return self._logits[:0]
        job = self._job[0]
        num_blocks, num_layers = kv_pool.shape[:2]
        job["pool"] = kv_pool.data_ptr()
        job["block_bytes"] = kv_pool.nbytes // num_blocks
        job["layer_bytes"] = kv_pool.nbytes // num_blocks // num_layers
        job["block_size"] = kv_pool.shape[4]
        self._rows.lay_out(step, job)
        return self._run(STEP, step.sample_rows)

    def logits(self, rows: Int32s) -> NDArray[np.float32]:
        if self._parameters is not None:
            raise RuntimeError("logits before freeze")
        return self._run(LOGITS, rows)

    def profile(self) -> Profile:
        job, rate = self._job[0], ticks_per_second()
        return Profile(*(float(job[f"cycles_{name}"]) / rate for name in ("gemm", "attention", "other")))

    def _run(self, function: int, rows: Int32s) -> NDArray[np.float32]:
        """With the logits of `rows`."""
        if len(rows) > self._limits.max_samples:
            raise RuntimeError(f"{len(rows)} rows of logits, at most {self._limits.max_samples} at once")
        job, sample_rows = self._job[0], np.ascontiguousarray(rows, dtype=np.int32)
        job["num_samples"], job["sample_rows"] = len(sample_rows), sample_rows.ctypes.data
        self._team.run(function, self._job.ctypes.data)
        return self._logits[: len(rows)]

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
        job["gemm"], job["attend"], job["num_threads"] = GEMM, ATTEND, self._team.num_threads
        for name in ("give_way", "thread_number", "thread_count"):
            job[name] = getattr(self._team, name)

    def _set_buffers(self) -> None:
        job, limits = self._job[0], self._limits
        sizes = self._buffer_sizes(limits.max_rows, limits.max_samples)
        self._buffers = area = Area(sum(sizes.values()))
        buffers = {name: area.take(size) for name, size in sizes.items()}
        for name, buffer in buffers.items():
            job[name] = buffer.data_ptr()
        job["x_stride"], job["scratch_stride"] = self._x_stride, self._rows.scratch_bytes
        num_logits = limits.max_samples * self._config.vocab_size
        logits = buffers["logits"].view(torch.float32)[:num_logits]
        self._logits = logits.view(limits.max_samples, -1).numpy()

    def _buffer_sizes(self, num_rows: int, num_samples: int) -> dict[str, int]:
        """Bytes, by the names of the job's fields; each with room behind it, as vectors are read past the end."""
        config, rows = self._config, max(num_rows, num_samples)
        heads = config.num_heads + 2 * config.num_kv_heads
        sizes = {
            "logits": num_samples * 4 * config.vocab_size,
            "x": rows * self._x_stride,
            "residual": rows * 4 * config.hidden_size,
            "qkv": rows * 4 * heads * config.head_dim,
            "delta": rows * 4 * config.hidden_size if config.sandwich_norms else 0,
            "gated": rows * 4 * _whole_vectors(config.intermediate_size),
            "tickets": 8 * config.num_layers,
            "meeting": MEETING_BYTES,
            "scratch": self._team.num_threads * self._rows.scratch_bytes,
        }
        return {name: aligned(size) + _SLACK_BYTES for name, size in sizes.items()}

    @property
    def _x_stride(self) -> int:
        """Bytes of a row of `x`, which holds a norm's result or attention's."""
        config = self._config
        return 4 * _whole_vectors(max(config.hidden_size, config.num_heads * config.head_dim))


def _whole_vectors(size: int) -> int:
    return -(-size // 16) * 16
