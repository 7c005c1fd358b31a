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
from pdserve.engine.memory import MemoryLimits, MemoryNeeds, MemoryPlan, plan_memory, render_plan
from pdserve.engine.memory_probe import MemoryMeter, available_bytes, resident_bytes
from pdserve.engine.model.choice import KernelChoice, ModelOptions, Precision, empty_model
from pdserve.engine.model.parameters import DecoderParameters
from pdserve.engine.model.rope import rope_table_bytes
from pdserve.engine.paged_kv import TORCH_DTYPES, PagedKv
from pdserve.engine.runner import SCORED_ROWS, ModelRunner
from pdserve.engine.weights import Progress, load_weights

WARM_UP_TOKENS = 64
FREE_SHARE = 0.8
"""Of the memory that is free at start, where no budget is given."""
MAX_CPU_BUDGET_BYTES = 4 << 30
"""And no more than this in host memory, which other processes want, too."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What to load and how much to hold. `max_step_tokens` and `max_step_samples` bound one forward.

    `kernels` and `attention_precision`: see `ModelOptions`.
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
    model = empty_model(files.config, _options(config, device))
    layout = _layout(files.config, config, model.kv_inner_order)
    plan = plan_memory(
        _limits(config, device, meter),
        _needs(files.config, config, model.workspace_bytes, meter),
        layout,
        files.config.context_length,
    )
    load_weights(files, model, progress)
    meter.mark("weights")
    paged_kv = PagedKv(layout, plan.num_blocks, device)
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


def _needs(model: ModelConfig, config: EngineConfig, workspace_bytes: int, meter: MemoryMeter) -> MemoryNeeds:
    """The largest step's activations, fp32: residual, norm and q/k/v/out rows, gate and up with their product; then
    logits, twice those that are sampled or, of a prompt, those scored at a time with their fp64 copy."""
    query = model.num_heads * model.head_dim
    widths = 4 * model.hidden_size + 6 * query + 5 * model.intermediate_size
    logits = max(8 * config.max_step_samples, 12 * SCORED_ROWS) * model.vocab_size
    return MemoryNeeds(
        weights=_num_weight_bytes(model, TORCH_DTYPES[config.dtype]),
        workspace=4 * config.max_step_tokens * widths + logits + workspace_bytes,
        transfer_buffers=config.transfer_buffer_bytes,
        runtime=meter.measured["runtime"],
    )


def _num_weight_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """All parameters, a table for each kind of rotation, and the exact fp32 copy of the head that logits need."""
    parameters = DecoderParameters(model, dtype, torch.device("meta")).num_bytes
    num_tables = len({attention.rope for attention in model.attention})
    exact_head = 4 * model.vocab_size * model.hidden_size if dtype != torch.float32 else 0
    return parameters + num_tables * rope_table_bytes(model.head_dim, model.context_length) + exact_head
