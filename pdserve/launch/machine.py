"""What this machine, or the container around us, has to offer."""

import os
from pathlib import Path

import psutil

from pdserve.launch.plan import Machine

CGROUP = Path("/sys/fs/cgroup")


def this_machine(cgroup: Path = CGROUP) -> Machine:
    """Cores this process may use, and free memory within the container's limit."""
    if hasattr(os, "sched_getaffinity"):
        cores = tuple(sorted(os.sched_getaffinity(0)))
    else:
        cores = tuple(range(os.cpu_count() or 1))
    return Machine(cores, min(int(psutil.virtual_memory().available), container_limit_bytes(cgroup)))


def container_limit_bytes(cgroup: Path) -> int:
    """The memory limit of the control group mounted at `cgroup`; the machine's memory where there is none."""
    total = int(psutil.virtual_memory().total)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = cgroup / name
        if path.is_file():
            text = path.read_text(encoding="ascii").strip()
            return min(total, int(text)) if text.isdigit() else total
    return total
