"""A run's figures. Latencies are of completed requests, and stand beside how many failed or were left over."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

PERCENTILES = (50.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True, slots=True)
class Slo:
    """What an interactive user accepts: time to first token, and the 99th percentile of a request's own ITLs."""

    ttft_s: float = 6.0
    itl_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of `count` samples, in seconds. Without samples every figure is None."""

    count: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    percentiles: dict[float, float]

    @property
    def median(self) -> float | None:
        return self.percentiles.get(50.0)

    @property
    def p99(self) -> float | None:
        return self.percentiles.get(99.0)

    @staticmethod
    def of(samples: ArrayLike, percentiles: tuple[float, ...] = PERCENTILES) -> "Distribution":
        """Percentiles are interpolated linearly between neighbours, as numpy and vLLM's benchmark do."""
        values = np.asarray(samples, dtype=np.float64)
        if values.size == 0:
            return Distribution(0, None, None, None, None, {})
        found = np.percentile(values, percentiles)
        return Distribution(
            count=int(values.size),
            mean=float(values.mean()),
            std=float(values.std()),
            min=float(values.min()),
            max=float(values.max()),
            percentiles=dict(zip(percentiles, found.tolist(), strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """Of some of a run's requests (all, a class, a bucket of lengths).

    Counts add up to `offered`. Throughputs, in tokens or requests a second of `duration_s`, count every token that was
    received within it, of failed requests too; prompts count where a first token came. `goodput`: `num_good` ÷
    `offered`, good being completed (or cancelled by us as planned), not found wrong, TTFT within the SLO, and the
    request's own p99 ITL too.
    `queue`: by the server's own timings, where it gives any.
    """

    offered: int
    completed: int
    failed: int
    rejected: int
    cancelled: int
    unfinished: int
    num_good: int
    num_wrong: int
    duration_s: float
    request_throughput: float
    prompt_throughput: float
    output_throughput: float
    goodput: float
    ttft: Distribution
    ttft_from_send: Distribution
    itl: Distribution
    tpot: Distribution
    e2e: Distribution
    queue: Distribution
    cached_share: float | None
    """Cached ÷ prompt tokens of completed requests, where the server says so."""
    num_count_mismatches: int
    """Requests whose usage differs from what was counted in their events, where events say how many they carry."""
