"""An engine on native kernels with threads and arithmetic of one's choice, and wild numbers for its pool."""

from pathlib import Path
from typing import cast

import numpy as np
import torch

from pdserve.core.model_files import open_model_files
from pdserve.engine.model.interface import Model
from pdserve.engine.model.native_decoder import NativeDecoderModel, NativeLimits
from pdserve.engine.paged_kv import TORCH_DTYPES
from pdserve.engine.runner import ModelRunner
from pdserve.engine.weights import load_weights
from pdserve_kernels.cpu.simd import HAS_BF16_DOT
from pdserve_kernels.cpu.team import make_team
from tests.support.engine_harness import MAX_ROWS, Engine, SpyModel, build_pool

ARITHMETICS = {"float32": ("float32", False), "bfloat16": ("bfloat16", False)}
if HAS_BF16_DOT:
    ARITHMETICS["bfloat16-dot"] = ("bfloat16", True)
"""Name → (dtype, whether attention rounds to bf16 too), where this processor can."""


def native_model(source: Path, arithmetic: str = "float32", threads: int = 1) -> NativeDecoderModel:
    dtype, bf16_attention = ARITHMETICS[arithmetic]
    files = open_model_files(source)
    model = NativeDecoderModel(
        files.config,
        TORCH_DTYPES[dtype],
        NativeLimits(MAX_ROWS, MAX_ROWS),
        make_team(threads),
        bf16_attention=bf16_attention,
    )
    load_weights(files, model)
    return model


def use_threads(model: NativeDecoderModel, threads: int) -> None:
    """From now on; at most as many as it was made with."""
    team, job = make_team(threads), model._job[0]
    model._team = team
    for name in ("num_threads", "give_way", "thread_number", "thread_count"):
        job[name] = getattr(team, name)


def native_engine(model: NativeDecoderModel, num_blocks: int = 512, block_size: int = 16) -> Engine:
    """The pool is full of NaN."""
    spy, dtype = SpyModel(cast("Model", model)), "bfloat16" if model.dtype == torch.bfloat16 else "float32"
    paged_kv = build_pool(cast("Model", model), dtype, num_blocks, block_size)
    paged_kv.pool.fill_(float("nan"))
    return Engine(ModelRunner(cast("Model", spy), paged_kv), spy, paged_kv, model.config)


def fill_with_noise(engine: Engine, seed: int) -> None:
    """Any bits at all: numbers of every size, infinities, NaN; the same in every block."""
    blocks = engine.paged_kv.pool.view(engine.paged_kv.num_blocks, -1).view(torch.uint8)
    noise = np.frombuffer(np.random.default_rng(seed).bytes(blocks.shape[1]), np.uint8)
    blocks.copy_(torch.from_numpy(noise.copy()))
