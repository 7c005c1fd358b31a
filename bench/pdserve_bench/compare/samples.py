"""Reads what a server showed of itself: series by metric and labels, as Prometheus spells them. Tolerates gaps."""

import re
from collections.abc import Mapping
from statistics import fmean

from pdserve_bench.load.records import RunResult, ServerSample

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def series(run: RunResult, metric: str, **labels: str) -> list[tuple[float, float]]:
    """(seconds from the run's begin, sum over the metric's series that carry these labels), where a sample has any."""
    found = ((sample.at_s, _sum(sample, metric, labels)) for sample in run.samples)
    return [(at_s, value) for at_s, value in found if value is not None]


def late_mean(run: RunResult, metric: str, **labels: str) -> float | None:
    """Over the second half of the run's arrivals, when a queue that grows has grown; None without samples."""
    end_s = max((record.scheduled_s for record in run.records), default=run.duration_s)
    values = [value for at_s, value in series(run, metric, **labels) if end_s / 2 <= at_s <= end_s]
    return fmean(values) if values else None


def _sum(sample: ServerSample, metric: str, labels: Mapping[str, str]) -> float | None:
    values = [value for key, value in sample.values.items() if _matches(key, metric, labels)]
    return sum(values) if values else None


def _matches(key: str, metric: str, labels: Mapping[str, str]) -> bool:
    name, _, rest = key.partition("{")
    return name == metric and labels.items() <= dict(_LABEL.findall(rest)).items()
