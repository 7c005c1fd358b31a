"""From settings to a loaded engine, with progress and the memory report in the log."""

import logging
from collections.abc import Callable, Sequence

import torch

from pdserve.core.model_fetch import resolve_model
from pdserve.engine.loading import EngineConfig, LoadedEngine, load_engine
from pdserve.engine.memory import MemoryLimits
from pdserve.serving.settings import Settings
from pdserve.worker.threads import describe_threads
from pdserve_kernels.host_memory import CAN_SHARE

logger = logging.getLogger(__name__)

PROGRESS_STEPS = 4


def load(settings: Settings, roles: tuple[str, ...]) -> LoadedEngine:
    """Fetch the model if need be, load it, and size the pool.

    Raises:
        PdserveError: what is wrong with the model, the device or the memory budget.
    """
    torch.set_num_threads(settings.worker.threads)
    model, worker = settings.model, settings.worker
    source = resolve_model(model.source, settings.cache_dir.expanduser())
    config = EngineConfig(
        source=source,
        name=model.name,
        dtype=model.dtype,
        device=model.device,
        block_size=worker.block_size,
        memory=MemoryLimits(worker.memory_budget_bytes, worker.memory_headroom_fraction, worker.num_blocks),
        max_step_tokens=token_budget(settings, roles) + (worker.max_batch_size if "decode" in roles else 0),
        max_step_samples=worker.max_batch_size,
        kernels=worker.kernels,
        attention_precision=worker.attention_precision,
        shared_pool=_lets_others_read(settings, roles),
    )
    loaded = load_engine(config, _progress())
    logger.info("%s", describe_threads())
    for line in loaded.memory_report().splitlines():
        logger.info("%s", line)
    if loaded.plan.warning:
        logger.warning("%s", loaded.plan.warning)
    return loaded


def _lets_others_read(settings: Settings, roles: Sequence[str]) -> bool:
    """A worker that only prefills and has its KV in host memory. Others read theirs at every decode step, and there
    huge pages, which shared memory often cannot have, count for more."""
    only_prefills = "prefill" in roles and "decode" not in roles
    return CAN_SHARE and only_prefills and settings.model.device == "cpu" and "shm" in settings.transfer.transports


def token_budget(settings: Settings, roles: Sequence[str]) -> int:
    """Prompt tokens in one step of a worker with these roles."""
    if "prefill" not in roles:
        return 0
    return settings.colocated.token_budget if "decode" in roles else settings.prefill.token_budget


def _progress() -> Callable[[int, int], None]:
    """Logs each quarter of the weights as it is loaded."""
    reported = 0

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal reported
        step = PROGRESS_STEPS * done_bytes // max(1, total_bytes)
        if step > reported:
            reported = step
            logger.info("loading weights: %d of %d MB", done_bytes >> 20, total_bytes >> 20)

    return progress
