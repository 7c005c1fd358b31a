"""Robust figures of a sample with their own uncertainty. Knows nothing of requests or phases."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Z_99 = 2.576
"""Standard normal deviate of a two-sided interval of 99 %."""

MIN_POINTS = 8
MIN_SPREAD = 1.5
"""Longest ÷ shortest x (10th and 90th percentile) below which a slope says nothing."""
MAX_POINTS = 500
"""A fit looks at every pair of points; of more points it takes as many, evenly."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 99 % interval, which holds the sampling noise of this one sample only."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


@dataclass(frozen=True, slots=True)
class LineFit:
    """y = fixed + slope · x, and y at the median x (`centre`), where it is known best."""

    fixed: Estimate
    slope: Estimate
    centre_x: float
    centre: Estimate

    def at(self, x: float) -> float:
        return self.fixed.value + self.slope.value * x


def quantile(samples: Sequence[float] | NDArray[np.float64], share: float) -> Estimate | None:
    """The quantile of `share` (0 to 1); None without samples.

    The interval is between two order statistics, whose ranks follow from the binomial distribution (its normal
    approximation), whatever the samples' own distribution: Conover, Practical Nonparametric Statistics, section 3.2.
    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    if ordered.size == 0:
        return None
    rank, margin = ordered.size * share, Z_99 * math.sqrt(ordered.size * share * (1 - share))
    return Estimate(
        float(np.quantile(ordered, share)), _at_rank(ordered, rank - margin), _at_rank(ordered, rank + margin)
    )


def theil_sen(xs: Sequence[float], ys: Sequence[float]) -> LineFit | None:
    """The line whose slope is the median over all pairs of points, so that a quarter of wild points does not move it.

    Slope: Theil 1950; its interval: Sen 1968; fixed part: the median of what the slope leaves. None for fewer than 8
    points, or for xs so alike that slope and fixed part cannot be told apart.
    """
    thinned = _evenly(len(xs))
    x, y = np.asarray(xs, dtype=np.float64)[thinned], np.asarray(ys, dtype=np.float64)[thinned]
    if x.size < MIN_POINTS or np.quantile(x, 0.9) < MIN_SPREAD * max(np.quantile(x, 0.1), 1.0):
        return None
    slope = _median_slope(x, y)
    centre_x = float(np.median(x))
    centre = quantile(y - slope.value * (x - centre_x), 0.5)
    fixed = quantile(y - slope.value * x, 0.5)
    if centre is None or fixed is None:
        return None
    tilt = slope.half_width * centre_x
    return LineFit(Estimate(fixed.value, fixed.low - tilt, fixed.high + tilt), slope, centre_x, centre)


def _median_slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> Estimate:
    first, second = np.triu_indices(x.size, k=1)
    apart = x[first] != x[second]
    first, second = first[apart], second[apart]
    slopes = np.sort((y[second] - y[first]) / (x[second] - x[first]))
    margin = Z_99 * math.sqrt(x.size * (x.size - 1) * (2 * x.size + 5) / 18)
    low, high = (slopes.size - margin) / 2, (slopes.size + margin) / 2
    return Estimate(float(np.median(slopes)), _at_rank(slopes, low), _at_rank(slopes, high))


def _at_rank(ordered: NDArray[np.float64], rank: float) -> float:
    return float(ordered[min(max(round(rank) - 1, 0), ordered.size - 1)])


def _evenly(num_points: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, max(0, num_points - 1), min(num_points, MAX_POINTS)).round().astype(np.int64))
