"""Bench workers around a real model instead of a formula: engine, scheduler, KV transfer and RPCs as in production."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pdserve.core.model_info import ModelInfo
from tests.support.bench_fleet import fleet
from tests.support.engine_harness import build_engine
from tests.support.worker_bench import BenchWorker, Coordinator, bench_settings


def real_worker(role: str, model: Path, *, token_budget: int = 6, dtype: str = "float32") -> BenchWorker:
    engine = build_engine(model, dtype, num_blocks=128, block_size=4)
    config = engine.config
    info = ModelInfo(
        "tiny", "f00d", "llama", dtype, config.vocab_size, config.context_length, tuple(config.eos_token_ids)
    )
    settings = bench_settings(token_budget=token_budget)
    return BenchWorker(role, settings, store=engine.paged_kv, runner=engine.runner, model=info)


@asynccontextmanager
async def real_fleet(
    model: Path, *, colocated: bool, token_budget: int = 6, dtype: str = "float32"
) -> AsyncIterator[Coordinator]:
    """A pair, or one colocated worker, empty again at the end."""
    first = real_worker("colocated" if colocated else "prefill", model, token_budget=token_budget, dtype=dtype)
    decode = None if colocated else real_worker("decode", model, token_budget=token_budget, dtype=dtype)
    async with fleet(first, decode, colocated=colocated) as coordinator:
        yield coordinator
