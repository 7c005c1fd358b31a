"""What the machine says of memory: what is free here, and what this process holds. Decides nothing."""

from collections.abc import Callable
from pathlib import Path

import psutil
import torch

CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device, cgroup_root: Path = CGROUP_ROOT) -> int:
    """Memory that can still be taken: on the GPU, or in the host within every control group this process is in."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([int(psutil.virtual_memory().available), *_cgroup_room(cgroup_root)])


def resident_bytes(device: torch.device) -> int:
    """What this process holds now: device memory on a GPU, else its resident set."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    return int(psutil.Process().memory_info().rss)


class MemoryMeter:
    """Attributes growth of what the process holds to named purposes."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._last = read()
        self.measured: dict[str, int] = {"runtime": self._last, "total": self._last}

    def mark(self, purpose: str) -> None:
        """All growth since the last mark was for `purpose`."""
        now = self._read()
        self.measured[purpose] = self.measured.get(purpose, 0) + now - self._last
        self.measured["total"] = self._last = now


def _cgroup_room(root: Path) -> list[int]:
    """Limit − use of each limited control group above this process (version 2, then 1); page cache is not use."""
    rooms: list[int] = []
    for group in _own_groups(root):
        for limit_name, use_name, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, use = _read_number(group / limit_name), _read_number(group / use_name)
            if limit is not None and use is not None:
                rooms.append(max(0, limit - use + _read_stat(group / "memory.stat", cache_key)))
    return rooms


def _own_groups(root: Path) -> list[Path]:
    """The directories of this process's groups and of all above them."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    groups = {root, root / "memory"}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root / "memory" if "memory" in controllers.split(",") else root
        leaf = base / path.lstrip("/")
        groups |= {leaf, *(parent for parent in leaf.parents if parent.is_relative_to(base))}
    return sorted(groups)


def _read_number(path: Path) -> int | None:
    """None where there is no such file, or no limit ("max")."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_stat(path: Path, key: str) -> int:
    try:
        fields = dict(line.split(" ", 1) for line in path.read_text().splitlines() if " " in line)
    except OSError:
        return 0
    return int(fields.get(key, "0"))
