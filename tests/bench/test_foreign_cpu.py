"""Foreign CPU from the text of /proc/stat, and measurements that are taken again."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_bench.foreign_cpu import CpuMeter, CpuReading, busy_seconds, cpu_seconds_of, quietest

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def stat(*ticks: int) -> str:
    """user nice system idle iowait irq softirq steal guest guest_nice, of all cores; then a core's own line."""
    return f"cpu  {' '.join(map(str, ticks))}\ncpu0 {' '.join('7' for _ in ticks)}\nintr 1 2 3\n"


def test_idle_time_disk_waits_and_guests_are_not_busy() -> None:
    assert busy_seconds(stat(0, 0, 0, 5000, 700, 0, 0, 0, 0, 0)) == 0
    assert busy_seconds(stat(1, 20, 300, 9, 9, 4000, 50000, 600000, 1, 20)) == pytest.approx(654321 / TICKS_PER_S)


@given(seconds=st.floats(0.5, 100), foreign=st.floats(0, 4), own=st.floats(0, 4))
def test_what_is_ours_is_not_foreign(seconds: float, foreign: float, own: float) -> None:
    begin = CpuReading(10.0, 500.0, 3.0)
    end = CpuReading(10.0 + seconds, 500.0 + (foreign + own) * seconds, 3.0 + own * seconds)
    assert end.foreign_cores_since(begin) == pytest.approx(foreign, abs=1e-9)


def test_a_count_that_lags_behind_our_own_clock_is_no_foreign_time() -> None:
    assert CpuReading(1.0, 0.5, 0.6).foreign_cores_since(CpuReading(0.0, 0.0, 0.0)) == 0


class Machine:
    """A machine on which each measurement takes a second while others use the next of `foreign` cores."""

    def __init__(self, folder: Path, foreign: list[float]) -> None:
        self._foreign: Iterator[float] = iter(foreign)
        self._stat = folder / "stat"
        self._now_s = self._busy_s = 0.0
        self._write()

    def meter(self) -> CpuMeter:
        return CpuMeter(own_s=lambda: self._now_s, stat=self._stat, clock_s=lambda: self._now_s)

    def measure(self) -> float:
        foreign = next(self._foreign)
        self._now_s += 1.0
        self._busy_s += 1.0 + foreign
        self._write()
        return foreign

    def _write(self) -> None:
        self._stat.write_text(stat(round(self._busy_s * TICKS_PER_S), 0, 0, 0, 0, 0, 0, 0, 0, 0), encoding="ascii")


@pytest.mark.parametrize(
    ("foreign", "kept", "num_tries", "noisy"),
    [
        ([0.05, 9.0], 0.05, 1, False),
        ([0.5, 0.02, 9.0], 0.02, 2, False),
        ([0.5, 0.2, 0.9, 9.0], 0.2, 3, True),
    ],
)
def test_a_disturbed_measurement_is_taken_again_and_the_quietest_kept(
    tmp_path: Path, foreign: list[float], kept: float, num_tries: int, noisy: bool
) -> None:
    machine = Machine(tmp_path, foreign)
    measured = quietest(machine.measure, max_tries=3, meter=machine.meter())
    assert (measured.value, measured.num_tries, measured.noisy) == (kept, num_tries, noisy)
    assert measured.foreign_cores == pytest.approx(kept)


def test_it_measures_once_at_least(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [3.0])
    assert quietest(machine.measure, max_tries=0, meter=machine.meter()).num_tries == 1


def test_this_machine_can_be_read() -> None:
    begin = CpuMeter().read()
    assert CpuMeter().read().busy_s >= begin.busy_s > 0
    assert cpu_seconds_of([os.getpid()]) > 0
