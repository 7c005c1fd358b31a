"""What this machine, or the container around us, has to offer."""

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

import psutil

from pdserve.launch.placement import Cpu
from pdserve.launch.plan import Machine

CGROUP = Path("/sys/fs/cgroup")
CPUS = Path("/sys/devices/system/cpu")


def this_machine(cgroup: Path = CGROUP) -> Machine:
    """Cores this process may use, and free memory within the container's limit."""
    if hasattr(os, "sched_getaffinity"):
        cores = tuple(sorted(os.sched_getaffinity(0)))
    else:
        cores = tuple(range(os.cpu_count() or 1))
    available_bytes = min(int(psutil.virtual_memory().available), container_limit_bytes(cgroup))
    return Machine(cores, available_bytes, read_topology(cores), container_cpu_quota(cgroup))


def read_topology(cores: Iterable[int], cpus: Path = CPUS) -> dict[int, Cpu]:
    """Where each of `cores` sits, for those of which `cpus` (Linux's folder of them) says so."""
    topology: dict[int, Cpu] = {}
    for core in cores:
        folder = cpus / f"cpu{core}"
        siblings = folder / "topology" / "thread_siblings_list"
        if siblings.is_file():
            ids = re.findall(r"\d+", siblings.read_text(encoding="ascii"))
            nodes = [int(path.name.removeprefix("node")) for path in folder.glob("node[0-9]*")]
            topology[core] = Cpu(core, min(map(int, ids), default=core), min(nodes, default=0))
    return topology


def container_cpu_quota(cgroup: Path) -> float:
    """Cores' worth of time that the control group mounted at `cgroup` allows; infinite where it sets no limit."""
    one_file, quota, period = cgroup / "cpu.max", cgroup / "cpu/cpu.cfs_quota_us", cgroup / "cpu/cpu.cfs_period_us"
    if one_file.is_file():
        words = one_file.read_text(encoding="ascii").split()
    elif quota.is_file() and period.is_file():
        words = [path.read_text(encoding="ascii").strip() for path in (quota, period)]
    else:
        return math.inf
    return int(words[0]) / int(words[1]) if words[0].isdigit() else math.inf


def container_limit_bytes(cgroup: Path) -> int:
    """The memory limit of the control group mounted at `cgroup`; the machine's memory where there is none."""
    total = int(psutil.virtual_memory().total)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = cgroup / name
        if path.is_file():
            text = path.read_text(encoding="ascii").strip()
            return min(total, int(text)) if text.isdigit() else total
    return total
