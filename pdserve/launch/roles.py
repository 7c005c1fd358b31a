"""The roles a process can take, and how one is run here. Imports a service only when it is about to run."""

import importlib
import os
from collections.abc import Callable
from typing import Protocol, cast

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.serving.settings import Settings

COORDINATOR = "coordinator"
WORKER_ROLES = ("prefill", "decode", "colocated")
MODULES = {
    COORDINATOR: "coordinator.main",
    "prefill": "prefill_service.main",
    "decode": "decode_service.main",
    "colocated": "colocated_service.main",
}

Ready = Callable[[dict[str, object]], None]


class RunService(Protocol):
    """A service's `run`: serve until SIGTERM or SIGINT has drained it; call `ready` once, when it serves."""

    def __call__(self, settings: Settings, ready: Ready) -> int: ...


def load_service(role: str) -> RunService:
    return cast(RunService, importlib.import_module(MODULES[role]).run)


def thread_environment(threads: int) -> dict[str, str]:
    """What OpenMP and MKL read once, at import."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def prepare_worker(settings: Settings) -> None:
    """Pin this process and bound its compute threads; must come before torch is imported.

    Raises:
        PdserveError: INVALID_ARGUMENT, if a core of `worker.cores` is not on this machine.
    """
    for variable, value in thread_environment(settings.worker.threads).items():
        os.environ.setdefault(variable, value)
    if not settings.worker.cores:
        return
    try:
        os.sched_setaffinity(0, settings.worker.cores)
    except (OSError, AttributeError) as error:
        cores = ", ".join(map(str, settings.worker.cores))
        raise PdserveError(ErrorReason.INVALID_ARGUMENT, f"worker.cores: cannot pin to {cores}: {error}") from None


def run_service(role: str, settings: Settings, ready: Ready, load: Callable[[str], RunService] = load_service) -> int:
    """Run one role in this process until it is told to stop; its exit code."""
    if role in WORKER_ROLES:
        prepare_worker(settings)
    return load(role)(settings, ready)
