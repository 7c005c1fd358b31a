"""When a difference between two fleets is one: a band from A/A pairs, and each figure's judgement. Pure."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from pdserve_bench.measures.summary import Summary

FLOOR = 0.03
"""No band is narrower: what a handful of pairs happens to agree on is not all the noise there is."""

Word = Literal["better", "worse", "none"]
Pair = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Figure:
    """One that is judged. `read`: None where a run has no such figure. `counts_requests`: it is a share of them."""

    name: str
    unit: str
    lower_is_better: bool
    read: Callable[[Summary], float | None]
    counts_requests: bool = False


FIGURES = (
    Figure("p99 ITL", "s", True, lambda summary: summary.itl.p99),
    Figure("p99 TTFT", "s", True, lambda summary: summary.ttft.p99),
    Figure("goodput", "of offered", False, lambda summary: summary.goodput, counts_requests=True),
    Figure("output throughput", "tokens/s", False, lambda summary: summary.output_throughput),
)


@dataclass(frozen=True, slots=True)
class Band:
    """Ratios that noise alone can bring about, `low` ≤ 1 ≤ `high`."""

    low: float
    high: float

    def contains(self, ratio: float) -> bool:
        return self.low <= ratio <= self.high


@dataclass(frozen=True, slots=True)
class Verdict:
    """`median` of the ratios; "none": it lies inside the band."""

    word: Word
    median: float


def ratio_of(value: float, other: float) -> float:
    """`value` ÷ `other`, neither negative. Equal ones are 1 apart, 0 against 0 too; anything over 0 is infinite."""
    if value == other:
        return 1.0
    return value / other if other else math.inf


def ratios_of(pairs: Iterable[Pair]) -> list[float]:
    """Of those pairs that have both values."""
    return [ratio_of(value, other) for value, other in pairs if value is not None and other is not None]


def band(ratios: Sequence[float], floor: float = FLOOR) -> Band:
    """As wide, both ways, as the A/A ratio that is farthest from 1 (on a logarithmic scale), and at least `floor`.

    There are too few pairs for percentiles or a fitted variance, so the worst that noise did while we looked is taken
    for what it can do. Pairs of every rate belong in one band: noise grows near saturation, and a band that is too wide
    for a calm rate errs to the side of calling a difference none.

    Raises:
        ValueError: without a single ratio nothing is known of the noise.
    """
    if not ratios:
        raise ValueError("no A/A pair has this figure: its noise is unknown")
    width = max(math.log1p(floor), *(abs(math.log(ratio)) if ratio else math.inf for ratio in ratios))
    return Band(math.exp(-width), math.exp(width))


def judge(ratios: Sequence[float], noise: Band, *, lower_is_better: bool = False) -> Verdict:
    """Of one fleet's figure to another's, one ratio for each round.

    Raises:
        ValueError: there is no ratio.
    """
    if not ratios:
        raise ValueError("no round has this figure of both fleets")
    middle = median(ratios)
    if noise.contains(middle):
        return Verdict("none", middle)
    return Verdict("better" if (middle < 1) == lower_is_better else "worse", middle)
