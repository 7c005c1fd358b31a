"""Under which conditions a benchmark ran: versions, revision, machine. Imports nothing of what it names."""

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

PACKAGES = ("pdserve", "torch", "numba", "numpy", "grpcio")
_CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512vl", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_tile")


def conditions(settings: Mapping[str, object], seeds: Mapping[str, int], foreign_cores: float) -> dict[str, object]:
    """What every result carries, as JSON.

    Args:
        settings: whatever was chosen, the models' fingerprints among it.
        foreign_cores: the most that other processes used during any measurement that was kept.
    """
    return {
        "settings": dict(settings),
        "seeds": dict(seeds),
        "foreign_cores": foreign_cores,
        "versions": versions(),
        "git_revision": git_revision(),
        "machine": machine(),
    }


def versions() -> dict[str, str | None]:
    """Of Python and of the packages that matter; None for one that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_revision(folder: Path = Path(__file__).parent) -> str | None:
    """The commit of the sources, with "-dirty" if they differ from it; None where they are not in a repository."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, object]:
    """The processor, those of its features that kernels choose by, the cores this process may use, and memory."""
    fields = _first_processor(cpuinfo.read_text(encoding="utf-8")) if cpuinfo.exists() else {}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cpu_family_model": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "architecture": platform.machine(),
        "flags": [flag for flag in _CPU_FLAGS if flag in flags],
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "kernel": platform.release(),
    }


def _first_processor(cpuinfo: str) -> dict[str, str]:
    lines = [line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines()]
    return {name.strip(): value.strip() for name, _, value in lines}
