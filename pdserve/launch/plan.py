"""Which processes a local fleet consists of, and what each is given of the machine. Pure: starts and reads nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.launch.roles import COORDINATOR, thread_environment
from pdserve.serving.settings import Settings, WorkerSettings

MEMORY_FRACTION = 0.8
MAX_BUDGET_BYTES = 4 * 1024**3


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to share: core ids, and bytes of memory not in use."""

    cores: tuple[int, ...]
    available_bytes: int


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """One process to start. `environment` is added to the launcher's own."""

    role: str
    name: str
    settings: Settings
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


def worker_roles(settings: Settings) -> list[str]:
    """The role of each worker of the fleet, in order of their start."""
    launch = settings.launch
    if launch.mode == "colocated":
        return ["colocated"] * launch.colocated
    return ["prefill"] * launch.prefill + ["decode"] * launch.decode


def check_plan(settings: Settings, machine: Machine) -> None:
    """Refuse settings that several workers of one machine cannot share.

    Raises:
        PdserveError: INVALID_ARGUMENT, one line for each problem.
    """
    worker, several = settings.worker, len(worker_roles(settings)) > 1
    missing = sorted(set(worker.cores) - set(machine.cores))
    checks = (
        (several and worker.control_port != 0, "worker.control_port must be 0 when several workers share a machine"),
        (several and worker.kv_port != 0, "worker.kv_port must be 0 when several workers share a machine"),
        (several and worker.worker_id != "", "worker.worker_id cannot name several workers"),
        (bool(missing), f"worker.cores: not on this machine: {', '.join(map(str, missing))}"),
    )
    problems = [message for wrong, message in checks if wrong]
    if problems:
        raise PdserveError(ErrorReason.INVALID_ARGUMENT, "\n".join(problems))


def plan_coordinator(settings: Settings) -> ChildPlan:
    return ChildPlan(COORDINATOR, COORDINATOR, settings)


def plan_workers(settings: Settings, machine: Machine, coordinator_address: str) -> tuple[ChildPlan, ...]:
    """Every worker with its id, cores, threads and memory budget, dialling `coordinator_address` first."""
    roles = worker_roles(settings)
    names = [f"{role}-{roles[:index].count(role)}" for index, role in enumerate(roles)]
    on_cpu = settings.model.device == "cpu"
    shares: Sequence[tuple[int, ...]] = [()] * len(roles)
    if on_cpu and settings.launch.pin and machine.cores:
        shares = share_cores(settings.worker.cores or machine.cores, len(roles))
    plans: list[ChildPlan] = []
    for role, name, cores in zip(roles, names, shares, strict=True):
        changes: dict[str, object] = {
            "worker_id": settings.worker.worker_id or name,
            "coordinators": (coordinator_address, *settings.worker.coordinators),
            "cores": cores or settings.worker.cores,
            "threads": threads_for(settings.worker, cores),
        }
        if on_cpu:
            changes["memory_budget_bytes"] = settings.worker.memory_budget_bytes or memory_share(machine, len(roles))
        worker = settings.worker.model_copy(update=changes)
        environment = thread_environment(worker.threads) if on_cpu else {}
        plans.append(ChildPlan(role, worker.worker_id, settings.model_copy(update={"worker": worker}), environment))
    return tuple(plans)


def threads_for(worker: WorkerSettings, cores: Sequence[int]) -> int:
    """`worker.threads` where somebody set it, else one thread a core."""
    return worker.threads if "threads" in worker.model_fields_set or not cores else len(cores)


def share_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Disjoint runs of cores that use all, the first ones longer; with more workers than cores, one each in turn."""
    if num_workers >= len(cores):
        return [(cores[index % len(cores)],) for index in range(num_workers)]
    each, longer = divmod(len(cores), num_workers)
    starts = [index * each + min(index, longer) for index in range(num_workers + 1)]
    return [tuple(cores[start:end]) for start, end in pairwise(starts)]


def memory_share(machine: Machine, num_workers: int) -> int:
    """Bytes for each worker: an equal part of most of what is free, at most 4 GiB."""
    return min(MAX_BUDGET_BYTES, int(MEMORY_FRACTION * machine.available_bytes) // num_workers)
