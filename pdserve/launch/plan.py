"""Which processes a local fleet consists of, and what each is given of the machine. Pure: starts and reads nothing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.launch.placement import Cpu, Want, place
from pdserve.launch.roles import COORDINATOR, thread_environment
from pdserve.serving.settings import ModelSettings, Settings, WorkerSettings

MEMORY_FRACTION = 0.8
MAX_BUDGET_BYTES = 4 * 1024**3


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to share: core ids, and bytes of memory not in use."""

    cores: tuple[int, ...]
    available_bytes: int
    topology: Mapping[int, Cpu] = field(default_factory=dict[int, Cpu])
    """Where each core sits; one that is missing counts as a whole core on node 0."""
    cpu_quota: float = math.inf
    """Cores' worth of time that the container may use."""


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """One process to start. `environment` is added to the launcher's own."""

    role: str
    name: str
    settings: Settings
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class _Slot:
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


def _slots(settings: Settings) -> list[_Slot]:
    """Every model's workers: "decode-0", or "MODEL.decode-0" where there are several models."""
    roles = worker_roles(settings)
    numbered = [(role, f"{role}-{roles[:index].count(role)}") for index, role in enumerate(roles)]
    several = len(settings.models) > 1
    return [
        _Slot(role, f"{model.name}.{name}" if several else name, model)
        for model in settings.models
        for role, name in numbered
    ]


def check_plan(settings: Settings, machine: Machine) -> None:
    """Refuse settings that several workers of one machine cannot share.

    Raises:
        PdserveError: INVALID_ARGUMENT, one line for each problem.
    """
    worker, several = settings.worker, len(_slots(settings)) > 1
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


def sharing_warning(settings: Settings, machine: Machine) -> str:
    """What to tell the user if the workers' threads cannot each have a core; empty if they can."""
    num_on_cpu = sum(slot.on_cpu for slot in _slots(settings))
    num_cores = min(len(_shared_cores(settings, machine)), machine.cpu_quota)
    threads = settings.worker.threads
    if num_on_cpu * threads <= num_cores:
        return ""
    return (
        f"{num_on_cpu} CPU workers with worker.threads = {threads} on {num_cores:g} cores: they slow each other down; "
        "start fewer workers or threads"
    )


def plan_workers(settings: Settings, machine: Machine, coordinator_address: str) -> tuple[ChildPlan, ...]:
    """Every worker of every model with its id, cores and memory budget, dialling `coordinator_address` first.

    Workers on the CPU get `worker.threads` cores each and share its memory equally, whatever their models.
    """
    slots = _slots(settings)
    on_cpu = [slot for slot in slots if slot.on_cpu]
    shares = iter(_core_shares(settings, machine, on_cpu))
    memory_bytes = memory_share(machine, max(1, len(on_cpu)))
    plans: list[ChildPlan] = []
    for slot in slots:
        worker = settings.worker
        changes: dict[str, object] = {
            "worker_id": worker.worker_id or slot.name,
            "coordinators": (coordinator_address, *worker.coordinators),
        }
        if slot.on_cpu:
            changes |= {
                "cores": next(shares),
                "memory_budget_bytes": worker.memory_budget_bytes or memory_bytes,
            }
        plans.append(_plan(settings, slot, worker.model_copy(update=changes)))
    return tuple(plans)


def _shared_cores(settings: Settings, machine: Machine) -> tuple[int, ...]:
    return settings.worker.cores or machine.cores


def _core_shares(settings: Settings, machine: Machine, workers: Sequence[_Slot]) -> Sequence[tuple[int, ...]]:
    """Of each of `workers`; without `launch.pin`, `worker.cores` as it is."""
    if not settings.launch.pin:
        return [settings.worker.cores] * len(workers)
    cpus = [machine.topology.get(core, Cpu(core, core)) for core in _shared_cores(settings, machine)]
    wants = [Want(settings.worker.threads, decode=worker.role != "prefill") for worker in workers]
    return place(cpus, wants)


def _plan(settings: Settings, slot: _Slot, worker: WorkerSettings) -> ChildPlan:
    own = {"model": slot.model, "more_models": (), "worker": worker}
    environment = thread_environment(worker.threads) if slot.on_cpu else {}
    return ChildPlan(slot.role, worker.worker_id, settings.model_copy(update=own), environment)


def memory_share(machine: Machine, num_workers: int) -> int:
    """Bytes for each worker: an equal part of most of what is free, at most 4 GiB."""
    return min(MAX_BUDGET_BYTES, int(MEMORY_FRACTION * machine.available_bytes) // num_workers)
