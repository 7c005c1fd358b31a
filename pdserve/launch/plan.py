"""Which processes a local fleet consists of, and what each is given of the machine. Pure: starts and reads nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.launch.roles import COORDINATOR, thread_environment
from pdserve.serving.settings import ModelSettings, Settings, WorkerSettings

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


@dataclass(frozen=True, slots=True)
class _Place:
    """One worker that the fleet has, before it is given anything."""

    role: str
    name: str
    model: ModelSettings

    @property
    def on_cpu(self) -> bool:
        return self.model.device == "cpu"


def worker_roles(settings: Settings) -> list[str]:
    """The role of each of one model's workers, in order of their start."""
    launch = settings.launch
    if launch.mode == "colocated":
        return ["colocated"] * launch.colocated
    return ["prefill"] * launch.prefill + ["decode"] * launch.decode


def _places(settings: Settings) -> list[_Place]:
    """Every model's workers: "decode-0", or "MODEL.decode-0" where there are several models."""
    roles = worker_roles(settings)
    numbered = [(role, f"{role}-{roles[:index].count(role)}") for index, role in enumerate(roles)]
    several = len(settings.models) > 1
    return [
        _Place(role, f"{model.name}.{name}" if several else name, model)
        for model in settings.models
        for role, name in numbered
    ]


def check_plan(settings: Settings, machine: Machine) -> None:
    """Refuse settings that several workers of one machine cannot share.

    Raises:
        PdserveError: INVALID_ARGUMENT, one line for each problem.
    """
    worker, several = settings.worker, len(_places(settings)) > 1
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
    """Every worker of every model with its id, cores, threads and memory budget, dialling `coordinator_address` first.

    Workers on the CPU share its cores and memory equally, whatever their models.
    """
    places = _places(settings)
    num_on_cpu = sum(place.on_cpu for place in places)
    shares = iter(_core_shares(settings, machine, num_on_cpu))
    memory_bytes = memory_share(machine, max(1, num_on_cpu))
    plans: list[ChildPlan] = []
    for place in places:
        worker = settings.worker
        changes: dict[str, object] = {
            "worker_id": worker.worker_id or place.name,
            "coordinators": (coordinator_address, *worker.coordinators),
        }
        if place.on_cpu:
            cores = next(shares)
            changes |= {
                "cores": cores or worker.cores,
                "threads": threads_for(worker, cores),
                "memory_budget_bytes": worker.memory_budget_bytes or memory_bytes,
            }
        plans.append(_plan(settings, place, worker.model_copy(update=changes)))
    return tuple(plans)


def _core_shares(settings: Settings, machine: Machine, num_workers: int) -> Sequence[tuple[int, ...]]:
    """Of each worker on the CPU; empty: not pinned."""
    if settings.launch.pin and machine.cores and num_workers:
        return share_cores(settings.worker.cores or machine.cores, num_workers)
    return [()] * num_workers


def _plan(settings: Settings, place: _Place, worker: WorkerSettings) -> ChildPlan:
    own = {"model": place.model, "more_models": (), "worker": worker}
    environment = thread_environment(worker.threads) if place.on_cpu else {}
    return ChildPlan(place.role, worker.worker_id, settings.model_copy(update=own), environment)


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
