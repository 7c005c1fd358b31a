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
from pdserve.engine.evaluation import evaluation_id
from pdserve.engine.freed_memory import return_freed_memory
from pdserve.engine.memory import MemoryLimits, MemoryNeeds, MemoryPlan, plan_memory, render_plan
from pdserve.engine.memory_probe import MemoryMeter, available_bytes, resident_bytes
from pdserve.engine.model.choice import KernelChoice, ModelOptions, Precision, empty_model, prepare_kernels
from pdserve.engine.model.interface import Model
from pdserve.engine.paged_kv import TORCH_DTYPES, PagedKv
from pdserve.engine.runner import SCORED_ROWS, ModelRunner
from pdserve.engine.weights import Progress, load_weights

WARM_UP_TOKENS = 64
FREE_SHARE = 0.8
"""Of the memory that is free at start, where no budget is given."""
MAX_CPU_BUDGET_BYTES = 4 << 30
"""And no more than this in host memory, which other processes want, too."""
_SAMPLING_BYTES = 128
"""For each token of the vocabulary: one row at a time is sampled or scored, by way of a dozen arrays of up to fp64."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What to load and how much to hold. `max_step_tokens` and `max_step_samples` bound one forward.

    `kernels` and `attention_precision`: see `ModelOptions`. `shared_pool`: KV blocks lie in memory that other processes
    may be let read.
    """

    source: Path
    name: str
    dtype: str = "bfloat16"
    device: str = "cpu"
    block_size: int = 16
    memory: MemoryLimits = field(default_factory=MemoryLimits)
    transfer_buffer_bytes: int = 32 << 20
    max_step_tokens: int = 576
    max_step_samples: int = 64
    kernels: KernelChoice = "auto"
    attention_precision: Precision = "float32"
    shared_pool: bool = False


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

    Until KV memory is there, the process holds at most the plan's runtime and weights, the largest matrix a second
    time or the pages of one tensor in its file, and a few MiB for what is being decoded.

    Raises:
        PdserveError: the files are broken or need what is not implemented, the device is not there, or the memory
            budget is too small.
    """
    device = _device(config.device)
    files = open_model_files(config.source)
    options = _options(config, device)
    prepare_kernels(files.config, options)
    meter = MemoryMeter(partial(resident_bytes, device))
    model = empty_model(files.config, options)
    layout = _layout(files.config, config, model.kv_inner_order)
    plan = plan_memory(
        _limits(config, device, meter),
        _needs(config, model, options.max_samples, meter),
        layout,
        files.config.context_length,
    )
    load_weights(files, model, progress)
    return_freed_memory()
    meter.mark("weights")
    paged_kv = PagedKv(layout, plan.num_blocks, device, shared=config.shared_pool)
    meter.mark("KV cache")
    runner = ModelRunner(model, paged_kv)
    runner.warm_up(min(WARM_UP_TOKENS, config.max_step_tokens))
    meter.mark("workspace")
    model_fingerprint = fingerprint(files, config.dtype)
    info = ModelInfo(
        name=config.name,
        fingerprint=model_fingerprint,
        architecture=files.config.architecture,
        dtype=config.dtype,
        vocab_size=files.config.vocab_size,
        context_length=files.config.context_length,
        eos_token_ids=files.config.eos_token_ids,
        evaluation_id=evaluation_id(model_fingerprint, config.dtype, layout, model.numerics_version),
    )
    return LoadedEngine(runner, paged_kv, info, plan, dict(meter.measured))


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PdserveError(
            ErrorReason.UNSUPPORTED, f"device {name} was asked for, but torch finds no GPU", param="device"
        )
    return device


def _options(config: EngineConfig, device: torch.device) -> ModelOptions:
    if config.dtype not in TORCH_DTYPES:
        raise PdserveError(ErrorReason.UNSUPPORTED, f"dtype {config.dtype!r} is not implemented", param="dtype")
    return ModelOptions(
        dtype=TORCH_DTYPES[config.dtype],
        device=device,
        block_size=config.block_size,
        max_rows=config.max_step_tokens,
        max_samples=max(config.max_step_samples, SCORED_ROWS),
        kernels=config.kernels,
        attention_precision=config.attention_precision,
    )


def _layout(model: ModelConfig, config: EngineConfig, inner_order: str) -> KvLayout:
    return KvLayout(
        config.dtype,
        config.block_size,
        model.num_layers,
        model.num_kv_heads,
        model.head_dim,
        inner_order=inner_order,
    )


def _limits(config: EngineConfig, device: torch.device, meter: MemoryMeter) -> MemoryLimits:
    """What this process holds already counts against its budget, so it counts as free at first."""
    if config.memory.budget_bytes:
        return config.memory
    free = available_bytes(device) + meter.measured["runtime"]
    budget = int(free * FREE_SHARE)
    if device.type == "cpu":
        budget = min(budget, MAX_CPU_BUDGET_BYTES)
    return replace(config.memory, budget_bytes=budget)


def _needs(config: EngineConfig, model: Model, num_samples: int, meter: MemoryMeter) -> MemoryNeeds:
    sampling = _SAMPLING_BYTES * model.config.vocab_size
    return MemoryNeeds(
        weights=model.weight_bytes,
        workspace=model.workspace_bytes(config.max_step_tokens, num_samples) + sampling,
        transfer_buffers=config.transfer_buffer_bytes,
        runtime=meter.measured["runtime"],
    )
