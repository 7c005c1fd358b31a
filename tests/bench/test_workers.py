"""What a fleet's workers cost: the bounds, and one real fleet of a tiny model."""

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pdserve_bench.workers import FleetFigures, WorkerFigures, shared_pools
from pdserve_kernels.host_memory import shared_empty


def figures(resident_bytes: int, start_s: float) -> FleetFigures:
    worker = WorkerFigures("decode-0", resident_bytes, 100_000_000, 0, 300_000_000, 700_000_000, 2.0)
    return FleetFigures(start_s, 0.02, (worker,))


@pytest.mark.parametrize(
    ("resident_bytes", "start_s", "met"),
    [(1_700_000_000, 10.0, [True, True]), (1_700_000_001, 10.1, [False, False])],
)
def test_memory_and_start_have_bounds(resident_bytes: int, start_s: float, met: list[bool]) -> None:
    ready, memory = figures(resident_bytes, start_s).targets()
    assert [target.met for target in (ready, memory)] == met
    assert (memory.unit, memory.target, ready.noise) == ("MB", pytest.approx(1700), 0.02)


@pytest.mark.slow
def test_a_fleet_is_started_looked_at_and_stopped(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    flags = ["--model", str(tiny_model), "--dtype", "float32", "--set", "worker.num_blocks=128", "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "pdserve.cli", "bench", "worker", *flags],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert not [child for child in psutil.Process().children() if "pdserve.launch.child" in child.cmdline()]
    document = json.loads(file.read_text(encoding="utf-8"))
    assert {worker["name"]: worker["pool_bytes"] for worker in document["workers"]} == {
        "prefill-0": 128 * 16 * 2 * 2 * 2 * 16 * 4,
        "decode-0": 128 * 16 * 2 * 2 * 2 * 16 * 4,
    }
    for worker in document["workers"]:
        assert worker["resident_bytes"] > worker["pool_bytes"] + worker["weight_bytes"]
        assert 0 < worker["mapped_bytes"] < worker["resident_bytes"] <= worker["peak_bytes"]
    assert [target["name"] for target in document["targets"]] == [
        "fleet, start to ready",
        "prefill-0, resident memory",
        "decode-0, resident memory",
    ]
    assert document["conditions"]["settings"]["fingerprint"]


def test_a_pool_in_shared_memory_is_its_owners() -> None:
    num_bytes = 1 << 20
    own, others = shared_pools(os.getpid())
    pool, fd = shared_empty(num_bytes)
    pool.fill_(1)
    assert shared_pools(os.getpid()) == (own + num_bytes, others)
    with mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ):
        assert shared_pools(os.getpid()) == (own + num_bytes, others + num_bytes)
    os.close(fd)
