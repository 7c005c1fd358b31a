"""What is read of the machine and its container."""

import math
from pathlib import Path

import psutil
import pytest

from pdserve.launch.machine import container_cpu_quota, container_limit_bytes, read_topology, this_machine
from pdserve.launch.placement import Cpu


@pytest.mark.parametrize(
    ("name", "text", "limited"),
    [("memory.max", "1000\n", True), ("memory.max", "max\n", False), ("memory/memory.limit_in_bytes", "1000", True)],
)
def test_a_containers_limit_counts(tmp_path: Path, name: str, text: str, limited: bool) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert container_limit_bytes(tmp_path) == (1000 if limited else psutil.virtual_memory().total)
    assert (this_machine(tmp_path).available_bytes == 1000) == limited


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({}, math.inf),
    ],
)
def test_a_containers_share_of_cpu_time(tmp_path: Path, files: dict[str, str], quota: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert container_cpu_quota(tmp_path) == quota
    assert this_machine(tmp_path).cpu_quota == quota


def test_siblings_and_nodes_are_read(tmp_path: Path) -> None:
    for core, siblings, node in ((0, "0,2", 0), (2, "0,2", 0), (3, "3-4", 1), (11, "11", 1)):
        folder = tmp_path / f"cpu{core}"
        (folder / "topology").mkdir(parents=True)
        (folder / "topology" / "thread_siblings_list").write_text(siblings + "\n")
        (folder / f"node{node}").mkdir()
    read = read_topology((0, 2, 3, 5, 11), tmp_path)
    assert read == {0: Cpu(0, 0, 0), 2: Cpu(2, 0, 0), 3: Cpu(3, 3, 1), 11: Cpu(11, 11, 1)}
