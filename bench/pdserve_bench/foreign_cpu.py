"""CPU time that others take while we measure, and how a measurement they disturbed is taken again. Linux only.

Foreign is all that kept the machine's cores busy, time stolen by its host included, less the measured processes' own.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import psutil

MAX_FOREIGN_CORES = 0.1
"""Above it a measurement is noisy."""

_STAT = Path("/proc/stat")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""user, nice, system, irq, softirq, steal; guests count as user already."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CpuReading:
    """Seconds since some fixed instants: of the clock, of all cores' busy time, of our own processes' CPU time."""

    at_s: float
    busy_s: float
    own_s: float

    def foreign_cores_since(self, begin: "CpuReading") -> float:
        """Cores that others kept busy, on average, since `begin`. The kernel counts ticks: trust it from 0.5 s on."""
        foreign_s = (self.busy_s - begin.busy_s) - (self.own_s - begin.own_s)
        return max(0.0, foreign_s / max(self.at_s - begin.at_s, 1e-9))


@dataclass(frozen=True, slots=True)
class CpuMeter:
    """Takes readings. `own_s` gives the CPU seconds of what is measured, by default of this process."""

    own_s: Callable[[], float] = time.process_time
    stat: Path = _STAT
    clock_s: Callable[[], float] = time.monotonic

    def read(self) -> CpuReading:
        return CpuReading(self.clock_s(), busy_seconds(self.stat.read_text(encoding="ascii")), self.own_s())


def busy_seconds(stat: str) -> float:
    """Core seconds since boot that were neither idle nor spent waiting for a disk, from the text of /proc/stat."""
    ticks = stat.splitlines()[0].split()[1:]
    return sum(int(ticks[field]) for field in _BUSY_FIELDS) / _TICKS_PER_S


def cpu_seconds_of(pids: list[int]) -> float:
    """CPU seconds of processes that all still run, their threads included."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(one.user + one.system for one in times))


@dataclass(frozen=True, slots=True)
class Measured(Generic[T]):
    """A value, the foreign cores while it was measured, and how often it was taken until they were few."""

    value: T
    foreign_cores: float
    num_tries: int

    @property
    def noisy(self) -> bool:
        return self.foreign_cores > MAX_FOREIGN_CORES


def quietest(measure: Callable[[], T], max_tries: int, meter: CpuMeter | None = None) -> Measured[T]:
    """Measure until a try is not noisy, at most `max_tries` times; the quietest try."""
    meter = meter or CpuMeter()
    tries: list[Measured[T]] = []
    while not tries or (tries[-1].noisy and len(tries) < max_tries):
        begin = meter.read()
        value = measure()
        tries.append(Measured(value, meter.read().foreign_cores_since(begin), len(tries) + 1))
    return replace(min(tries, key=lambda measured: measured.foreign_cores), num_tries=len(tries))
