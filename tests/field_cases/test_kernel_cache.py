"""Where compiled kernels are kept: folders that cannot be written and files cut short must cost time, nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve_kernels.host import why_not_here

pytestmark = pytest.mark.skipif(bool(why_not_here()), reason=f"native kernels cannot run: {why_not_here()}")

KERNEL = """
from numba import njit
from pdserve_kernels.cpu.compiled import JIT, signature
from part import factor

@njit(signature("i", "i"), **JIT)
def times(x):
    return x * factor(x)

print("answer", times(5))
"""
PART = """
from numba import njit
from pdserve_kernels.cpu.compiled import JIT, signature

@njit(signature("i", "i"), **JIT)
def factor(x):
    return {factor}
"""


def write_kernel(folder: Path, factor: int) -> None:
    """A kernel that includes one of another file, which has the factor."""
    (folder / "part.py").write_text(PART.format(factor=factor))
    if not (folder / "kernel.py").exists():
        (folder / "kernel.py").write_text(KERNEL)


def run_kernel(folder: Path, cache: Path) -> str:
    """What it prints; it is compiled, or found, as a worker's kernels are."""
    environment = {**os.environ, "PDSERVE_CACHE_DIR": str(cache), "HOME": str(cache)}
    command = [sys.executable, "-B", "kernel.py"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def unwritable(folder: Path) -> Path:
    """No folder can be made below it, whoever tries."""
    file = folder / "a-file"
    file.touch()
    return file / "cache"


def test_without_a_cache_folder_a_kernel_follows_its_sources(tmp_path: Path) -> None:
    answers: list[str] = []
    for factor in (2, 3):
        write_kernel(tmp_path, factor)
        answers.append(run_kernel(tmp_path, unwritable(tmp_path)))
    assert answers == ["answer 10", "answer 15"]


def test_with_no_place_to_write_at_all_a_kernel_runs(tmp_path: Path) -> None:
    """A read-only installation, and no home."""
    write_kernel(tmp_path, 2)
    (tmp_path / "__pycache__").touch()
    assert run_kernel(tmp_path, unwritable(tmp_path)) == "answer 10"


def test_a_file_cut_short_is_compiled_again(tmp_path: Path) -> None:
    """A full disk, or power lost before the bytes were there."""
    cache = tmp_path / "cache"
    write_kernel(tmp_path, 2)
    assert run_kernel(tmp_path, cache) == "answer 10"
    files = list(cache.rglob("*.nbc"))
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:100])
    assert run_kernel(tmp_path, cache) == "answer 10"
