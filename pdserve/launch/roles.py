"""The roles a process can take, and how one is run here. Imports a service only when it is about to run."""

import importlib
import logging
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
POOL_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")

_log = logging.getLogger(__name__)

Ready = Callable[[dict[str, object]], None]


class RunService(Protocol):
    """A service's `run`: serve until SIGTERM or SIGINT has drained it; call `ready` once, when it serves."""

    def __call__(self, settings: Settings, ready: Ready) -> int: ...


def load_service(role: str) -> RunService:
    return cast(RunService, importlib.import_module(MODULES[role]).run)


def thread_environment(threads: int) -> dict[str, str]:
    """What OpenMP, MKL, OpenBLAS and numba read once, when they are loaded: each of their pools gets `threads`."""
    return dict.fromkeys(POOL_VARIABLES, str(threads))


def warn_of_overridden(threads: int) -> None:
    """Log which variables of this process's environment ask for another number of threads than `worker.threads`."""
    wanted = thread_environment(threads).items()
    overridden = [f"{name}={os.environ[name]}" for name, value in wanted if os.environ.get(name, value) != value]
    if overridden:
        _log.warning("worker.threads = %d overrides %s", threads, ", ".join(overridden))


def prepare_worker(settings: Settings) -> None:
    """Bound this process's compute pools and pin it; must come before torch, numpy and numba are imported.

    Every thread that is there or is made later, the event loop's and gRPC's too, stays on `worker.cores`.

    Raises:
        PdserveError: INVALID_ARGUMENT, if a core of `worker.cores` is not on this machine.
    """
    warn_of_overridden(settings.worker.threads)
    os.environ.update(thread_environment(settings.worker.threads))
    if not settings.worker.cores:
        return
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), settings.worker.cores)
    except (OSError, AttributeError) as error:
        cores = ", ".join(map(str, settings.worker.cores))
        raise PdserveError(ErrorReason.INVALID_ARGUMENT, f"worker.cores: cannot pin to {cores}: {error}") from None


def run_service(role: str, settings: Settings, ready: Ready, load: Callable[[str], RunService] = load_service) -> int:
    """Run one role in this process until it is told to stop; its exit code."""
    if role in WORKER_ROLES:
        prepare_worker(settings)
    return load(role)(settings, ready)
