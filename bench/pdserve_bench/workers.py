"""What a fleet's workers cost: resident memory beside weights and KV pool, and the time from start to ready.

Starts the fleet as `pdserve serve` does, twice: the first start warms the caches of files and of compiled kernels. Each
worker's log has what it predicted beside what it measured, by purpose.
"""

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.table import Table

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_fetch import resolve_model
from pdserve.core.model_files import ModelFiles, open_model_files
from pdserve.core.model_files.files import fingerprint
from pdserve.core.model_info import KvLayout
from pdserve.launch.local import LocalFleet, RunningFleet
from pdserve.launch.plan import Machine
from pdserve.serving.settings import Settings
from pdserve_bench.conditions import conditions
from pdserve_bench.engine.costs import ModelCosts
from pdserve_bench.foreign_cpu import CpuMeter, cpu_seconds_of
from pdserve_bench.report import new_table
from pdserve_bench.report import result as result_file
from pdserve_bench.targets import Target

MEMORY_FACTOR = 1.35
MEMORY_EXTRA_BYTES = 350e6
READY_S = 10.0
PROMPT = "measure " * 300
_POOL_FILE = "memfd:pdserve-kv"
"""As the system shows what pdserve_kernels.host_memory makes."""
NUM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """Bytes, after a request has been through the fleet. `model_load_s`: of `FleetFigures.start_s`, by its own word.

    `resident_bytes`: without other workers' pools, which this one may read. `mapped_bytes`: of these, what is mapped
    from files, libraries above all. `peak_bytes`: the most that was resident, loading and others' pools included; 0
    where the system does not say.
    """

    name: str
    resident_bytes: int
    mapped_bytes: int
    peak_bytes: int
    weight_bytes: int
    pool_bytes: int
    model_load_s: float

    @property
    def bound_bytes(self) -> float:
        return MEMORY_FACTOR * (self.weight_bytes + self.pool_bytes) + MEMORY_EXTRA_BYTES


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """`start_s`: from the launcher's first act until every process serves, the coordinator's start included."""

    start_s: float
    foreign_cores: float
    workers: tuple[WorkerFigures, ...]

    def targets(self) -> list[Target]:
        ready = Target("fleet, start to ready", "s", "<=", self.start_s, READY_S, self.foreign_cores)
        return [ready, *(_memory_target(worker) for worker in self.workers)]


def measure_workers(settings: Settings, machine: Machine) -> FleetFigures:
    """Of the fleet that `settings` describe, on free ports. From the main thread only.

    Raises:
        PdserveError: the fleet did not start, or did not answer; its log on stderr says why.
    """
    coordinator = settings.coordinator.model_copy(update={"http_port": 0, "grpc_port": 0})
    settings = settings.model_copy(update={"coordinator": coordinator})
    _Start(settings, machine).run()
    return _Start(settings, machine).run()


def document(settings: Settings, figures: FleetFigures) -> dict[str, object]:
    chosen: dict[str, object] = settings.model_dump(mode="json", exclude={"coordinator": {"api_keys"}})
    chosen["fingerprint"] = fingerprint(_files(settings), settings.model.dtype)
    found = conditions(chosen, {}, figures.foreign_cores)
    return result_file("worker", found, asdict(figures), figures.targets())


def workers_table(figures: FleetFigures) -> Table:
    numbers = ("resident MB", "of it mapped", "peak MB", "weights MB", "KV pool MB", "bound MB", "model load s")
    table = new_table(f"Workers; the fleet was ready after {figures.start_s:.1f} s", ("worker",), numbers)
    for worker in figures.workers:
        held = (worker.resident_bytes, worker.mapped_bytes, worker.peak_bytes)
        sizes = (*held, worker.weight_bytes, worker.pool_bytes, worker.bound_bytes)
        table.add_row(worker.name, *(f"{size / 1e6:,.0f}" for size in sizes), f"{worker.model_load_s:.1f}")
    return table


def _memory_target(worker: WorkerFigures) -> Target:
    value, bound = worker.resident_bytes / 1e6, worker.bound_bytes / 1e6
    return Target(f"{worker.name}, resident memory", "MB", "<=", value, bound, 0.0)


class _Start:
    """One start of the fleet; it is stopped once it has been looked at."""

    def __init__(self, settings: Settings, machine: Machine) -> None:
        self._settings = settings
        self._fleet = LocalFleet(settings, machine, self._look_and_stop)
        self._figures: FleetFigures | None = None

    def run(self) -> FleetFigures:
        self._begin = CpuMeter(own_s=lambda: 0.0).read()
        self._process_begin_s = time.process_time()
        code = self._fleet.run()
        if code != 0 or self._figures is None:
            raise PdserveError(ErrorReason.INTERNAL, "the fleet did not start, or did not end well")
        return self._figures

    def _look_and_stop(self, fleet: RunningFleet) -> None:
        pids = _children_by_name()
        launcher_s = time.process_time() - self._process_begin_s
        ready = CpuMeter(own_s=lambda: launcher_s + cpu_seconds_of(list(pids.values()))).read()
        address = f"{fleet.host}:{fleet.grpc_port}"
        _pdserve("generate", PROMPT, "--max-tokens", str(NUM_TOKENS), "--address", address)
        loads = _loads(_pdserve("status", "--json", "--address", address))
        self._figures = FleetFigures(
            start_s=ready.at_s - self._begin.at_s,
            foreign_cores=ready.foreign_cores_since(self._begin),
            workers=tuple(self._worker(plan.name, pids[plan.name], loads[plan.name]) for plan, _ in fleet.workers),
        )
        signal.raise_signal(signal.SIGTERM)

    def _worker(self, name: str, pid: int, load: dict[str, object]) -> WorkerFigures:
        settings = self._settings
        model = _files(settings).config
        dtype, block_size = settings.model.dtype, settings.worker.block_size
        layout = KvLayout(dtype, block_size, model.num_layers, model.num_kv_heads, model.head_dim)
        memory, own_pool, other_pools = psutil.Process(pid).memory_info(), *shared_pools(pid)
        return WorkerFigures(
            name=name,
            resident_bytes=int(memory.rss) - other_pools,
            mapped_bytes=int(memory.shared) - own_pool - other_pools,
            peak_bytes=_peak_bytes(pid),
            weight_bytes=ModelCosts(model, dtype).resident_weight_bytes,
            pool_bytes=int(str(load["num_usable_blocks"])) * layout.block_bytes,
            model_load_s=float(str(load["model_load_s"])),
        )


def _files(settings: Settings) -> ModelFiles:
    return open_model_files(resolve_model(settings.model.source, settings.cache_dir.expanduser()))


def shared_pools(pid: int) -> tuple[int, int]:
    """Resident bytes of KV pools in shared memory: the process's own, which it writes to, and others'."""
    maps = [one for one in psutil.Process(pid).memory_maps(grouped=False) if _POOL_FILE in one.path]
    own = sum(int(one.rss) for one in maps if "w" in one.perms)
    return own, sum(int(one.rss) for one in maps) - own


def _peak_bytes(pid: int) -> int:
    """Linux only; else 0."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def _children_by_name() -> dict[str, int]:
    """Pids of this process's children that the launcher gave a name."""
    flag = "--name="
    return {
        word.removeprefix(flag): int(child.pid)
        for child in psutil.Process().children()
        for word in child.cmdline()
        if word.startswith(flag)
    }


def _loads(status: str) -> dict[str, dict[str, object]]:
    """Each worker's latest load report, by its name, from `pdserve status --json`."""
    workers = [worker for pool in json.loads(status)["pools"] for worker in pool["workers"]]
    return {worker["worker"]["worker_id"]: worker["load"] for worker in workers}


def _pdserve(*arguments: str) -> str:
    """A command's output; it runs in a process of its own, as the launcher's must not load gRPC."""
    command = [sys.executable, "-m", "pdserve.cli", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise PdserveError(ErrorReason.INTERNAL, f"pdserve {arguments[0]} ended with exit code {done.returncode}")
    return done.stdout
