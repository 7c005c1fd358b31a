"""Builds a worker's engine: files, memory plan, weights, pool, runner. The services call this and nothing below it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_files import ModelConfig, open_model_files
from pdserve.core.model_files.files import fingerprint
from pdserve.core.model_info import KvLayout, ModelInfo
from pdserve.engine.memory import MemoryLimits, MemoryNeeds, MemoryPlan, plan_memory, render_plan
from pdserve.engine.memory_probe import MemoryMeter, available_bytes, resident_bytes
from pdserve.engine.model.decoder import DecoderModel
from pdserve.engine.model.parameters import DecoderParameters
from pdserve.engine.model.rope import rope_table_bytes
from pdserve.engine.paged_kv import TORCH_DTYPES, PagedKv
from pdserve.engine.runner import SCORED_ROWS, ModelRunner
from pdserve.engine.weights import Progress, load_weights
from pdserve_kernels.interface import Kernels
from pdserve_kernels.torch_reference import TorchKernels

FREE_SHARE = 0.8
"""Of the memory that is free at start, where no budget is given."""
MAX_CPU_BUDGET_BYTES = 4 << 30
"""And no more than this in host memory, which other processes want, too."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What to load and how much to hold. `max_step_tokens` and `max_step_samples` bound one forward, for the plan."""

    source: Path
    name: str
    dtype: str = "bfloat16"
    device: str = "cpu"
    block_size: int = 16
    memory: MemoryLimits = field(default_factory=MemoryLimits)
    transfer_buffer_bytes: int = 32 << 20
    max_step_tokens: int = 576
    max_step_samples: int = 64


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A model ready to run. `measured` holds bytes by the names of `render_plan`."""

    runner: ModelRunner
    paged_kv: PagedKv
    model_info: ModelInfo
    plan: MemoryPlan
    measured: Mapping[str, int]

    def memory_report(self) -> str:
        """Predicted beside measured."""
        return render_plan(self.plan, self.measured)


def load_engine(config: EngineConfig, progress: Progress | None = None) -> LoadedEngine:
    """Load, plan, allocate and warm up.

    Raises:
        PdserveError: the files are broken or need what is not implemented, the device is not there, or the memory
            budget is too small.
    """
    device = _device(config.device)
    meter = MemoryMeter(partial(resident_bytes, device))
    files = open_model_files(config.source)
    kernels = TorchKernels()
    layout = _layout(files.config, config)
    plan = plan_memory(
        _limits(config, device, meter),
        _needs(files.config, config, kernels, meter),
        layout,
        files.config.context_length,
    )
    model = DecoderModel(files.config, TORCH_DTYPES[config.dtype], device, kernels)
    load_weights(files, model, progress)
    meter.mark("weights")
    paged_kv = PagedKv(layout, plan.num_blocks, device)
    meter.mark("KV cache")
    runner = ModelRunner(model, kernels, paged_kv)
    runner.warm_up()
    meter.mark("workspace")
    info = ModelInfo(
        name=config.name,
        fingerprint=fingerprint(files, config.dtype),
        architecture=files.config.architecture,
        dtype=config.dtype,
        vocab_size=files.config.vocab_size,
        context_length=files.config.context_length,
        eos_token_ids=files.config.eos_token_ids,
    )
    return LoadedEngine(runner, paged_kv, info, plan, dict(meter.measured))


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PdserveError(
            ErrorReason.UNSUPPORTED, f"device {name} was asked for, but torch finds no GPU", param="device"
        )
    return device


def _layout(model: ModelConfig, config: EngineConfig) -> KvLayout:
    if config.dtype not in TORCH_DTYPES:
        raise PdserveError(ErrorReason.UNSUPPORTED, f"dtype {config.dtype!r} is not implemented", param="dtype")
    return KvLayout(config.dtype, config.block_size, model.num_layers, model.num_kv_heads, model.head_dim)


def _limits(config: EngineConfig, device: torch.device, meter: MemoryMeter) -> MemoryLimits:
    """What this process holds already counts against its budget, so it counts as free at first."""
    if config.memory.budget_bytes:
        return config.memory
    free = available_bytes(device) + meter.measured["runtime"]
    budget = int(free * FREE_SHARE)
    if device.type == "cpu":
        budget = min(budget, MAX_CPU_BUDGET_BYTES)
    return replace(config.memory, budget_bytes=budget)


def _needs(model: ModelConfig, config: EngineConfig, kernels: Kernels, meter: MemoryMeter) -> MemoryNeeds:
    """The largest step's activations, fp32: residual, norm and q/k/v/out rows, gate and up with their product; then
    logits, twice those that are sampled or, of a prompt, those scored at a time with their fp64 copy."""
    query = model.num_heads * model.head_dim
    widths = 4 * model.hidden_size + 6 * query + 5 * model.intermediate_size
    logits = max(8 * config.max_step_samples, 12 * SCORED_ROWS) * model.vocab_size
    return MemoryNeeds(
        weights=_num_weight_bytes(model, TORCH_DTYPES[config.dtype]),
        workspace=4 * config.max_step_tokens * widths + logits + kernels.workspace_bytes,
        transfer_buffers=config.transfer_buffer_bytes,
        runtime=meter.measured["runtime"],
    )


def _num_weight_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """All parameters, a table for each kind of rotation, and the exact fp32 copy of the head that logits need."""
    parameters = DecoderParameters(model, dtype, torch.device("meta")).num_bytes
    num_tables = len({attention.rope for attention in model.attention})
    exact_head = 4 * model.vocab_size * model.hidden_size if dtype != torch.float32 else 0
    return parameters + num_tables * rope_table_bytes(model.head_dim, model.context_length) + exact_head
