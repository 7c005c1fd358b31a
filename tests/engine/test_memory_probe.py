"""What the machine says of memory, control groups included."""

from pathlib import Path

import psutil
import torch

from pdserve.engine.memory_probe import MemoryMeter, available_bytes, resident_bytes

CPU = torch.device("cpu")


def write_group(group: Path, limit: str, use: int, cache: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(limit)
    (group / "memory.current").write_text(f"{use}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")


def test_a_control_group_bounds_what_is_free(tmp_path):
    write_group(tmp_path, "100000\n", 60000, 1000)
    assert available_bytes(CPU, tmp_path) == 41000


def test_version_1_groups_count_as_well(tmp_path):
    group = tmp_path / "memory"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text("5000")
    (group / "memory.usage_in_bytes").write_text("6000")
    assert available_bytes(CPU, tmp_path) == 0


def test_a_group_without_limit_bounds_nothing(tmp_path):
    write_group(tmp_path, "max\n", 60000, 0)
    assert 0 < available_bytes(CPU, tmp_path) <= psutil.virtual_memory().total
    assert 0 < available_bytes(CPU, tmp_path / "absent") <= psutil.virtual_memory().total


def test_this_process_holds_something():
    assert resident_bytes(CPU) > 1 << 20


def test_the_meter_attributes_growth():
    readings = iter([100, 150, 155, 175])
    meter = MemoryMeter(lambda: next(readings))
    for purpose in ("weights", "KV cache", "weights"):
        meter.mark(purpose)
    assert meter.measured == {"runtime": 100, "weights": 70, "KV cache": 5, "total": 175}
