"""Figures of two sets of runs side by side, with the noise of each. Says nothing about causes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from pdserve_bench.compare.estimates import Estimate
from pdserve_bench.compare.phases import Phase, PhaseFigures


class Quantity(StrEnum):
    """What is compared. Waits by their 90th percentile, as most requests may not wait at all; the rest by medians."""

    QUEUE = "wait in the coordinator's queue (p90)"
    RESERVE = "wait for KV blocks (p90)"
    PREFILL_WAIT = "wait for the prefill worker (p90)"
    PREFILL_FIXED = "fixed cost per prefill"
    PREFILL_TOKEN = "prefill time per prompt token"
    PREFILL_TIME = "prefill time of a prompt"
    TRANSFER = "exposed transfer"
    DECODE_TOKEN = "decode time per token"
    STREAMING = "streaming to the client"


@dataclass(frozen=True, slots=True)
class Floor:
    """Smaller changes are not named: seconds, and share of the baseline's figure."""

    seconds: float
    share: float


_WAIT_FLOOR = Floor(0.020, 0.25)
_PREFILL_FLOOR = Floor(0.010, 0.10)
FLOORS = {
    Quantity.QUEUE: _WAIT_FLOOR,
    Quantity.RESERVE: _WAIT_FLOOR,
    Quantity.PREFILL_WAIT: _WAIT_FLOOR,
    Quantity.PREFILL_FIXED: _PREFILL_FLOOR,
    Quantity.PREFILL_TOKEN: _PREFILL_FLOOR,
    Quantity.PREFILL_TIME: _PREFILL_FLOOR,
    Quantity.TRANSFER: Floor(0.005, 0.25),
    Quantity.DECODE_TOKEN: Floor(0.002, 0.10),
    Quantity.STREAMING: Floor(0.010, 0.50),
}

REPEATS_FACTOR = 2.0
"""Noise is this many times the range of the baseline's repeats: two or three of them show only a part of it."""

PHASES = {
    Quantity.QUEUE: Phase.QUEUE,
    Quantity.RESERVE: Phase.RESERVE,
    Quantity.PREFILL_WAIT: Phase.PREFILL_WAIT,
    Quantity.PREFILL_FIXED: Phase.PREFILL,
    Quantity.PREFILL_TOKEN: Phase.PREFILL,
    Quantity.PREFILL_TIME: Phase.PREFILL,
    Quantity.TRANSFER: Phase.TRANSFER,
    Quantity.DECODE_TOKEN: Phase.DECODE,
    Quantity.STREAMING: Phase.STREAMING,
}
_PREFILL = frozenset({Quantity.PREFILL_FIXED, Quantity.PREFILL_TOKEN, Quantity.PREFILL_TIME})


@dataclass(frozen=True, slots=True)
class Change:
    """Of one quantity; `noise_s` is what it may change by for no reason."""

    quantity: Quantity
    before_s: float
    after_s: float
    noise_s: float

    @property
    def amount_s(self) -> float:
        return self.after_s - self.before_s

    @property
    def ratio(self) -> float | None:
        return self.after_s / self.before_s if self.before_s > 1e-6 else None

    @property
    def counts(self) -> bool:
        """Whether it exceeds both the noise and the floor."""
        floor = FLOORS[self.quantity]
        return abs(self.amount_s) > max(self.noise_s, floor.seconds, floor.share * self.before_s)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The figures of each run of the baseline, of the subject, and of more runs of what the baseline is."""

    before: Sequence[PhaseFigures]
    after: Sequence[PhaseFigures]
    control: Sequence[PhaseFigures] = ()

    @property
    def prompt_tokens(self) -> float | None:
        """The baseline's median prompt, at which prefill times are compared; None where a run has no fit."""
        fits = [figures.prefill for figures in (*self.before, *self.after)]
        centres = [fit.centre_x for fit in fits[: len(self.before)] if fit is not None]
        return None if None in fits else median(centres)

    def change(self, quantity: Quantity) -> Change | None:
        """Parts of the prefill's time are scaled to the median prompt; None where a side lacks the quantity."""
        tokens = self.prompt_tokens
        before, after, control = (_known(runs, quantity, tokens) for runs in (self.before, self.after, self.control))
        if not before or not after:
            return None
        repeats = [one.value for one in (*before, *control)]
        return Change(
            quantity=quantity,
            before_s=median(one.value for one in before),
            after_s=median(one.value for one in after),
            noise_s=max(
                math.hypot(_half_width(before), _half_width(after)), REPEATS_FACTOR * (max(repeats) - min(repeats))
            ),
        )


def _known(runs: Sequence[PhaseFigures], quantity: Quantity, tokens: float | None) -> list[Estimate]:
    picked = (_estimate(figures, quantity, tokens) for figures in runs)
    return [estimate for estimate in picked if estimate is not None]


def _estimate(figures: PhaseFigures, quantity: Quantity, tokens: float | None) -> Estimate | None:
    if quantity in _PREFILL and tokens is not None:
        return _prefill_estimate(figures, quantity, tokens)
    match quantity:
        case Quantity.QUEUE | Quantity.RESERVE | Quantity.PREFILL_WAIT:
            return figures.p90.get(PHASES[quantity])
        case Quantity.DECODE_TOKEN:
            return figures.decode_per_token
        case Quantity.PREFILL_FIXED | Quantity.PREFILL_TOKEN:
            return None
        case _:
            return figures.median.get(PHASES[quantity])


def _prefill_estimate(figures: PhaseFigures, quantity: Quantity, tokens: float) -> Estimate | None:
    fit = figures.prefill
    if fit is None:
        return None
    if quantity is Quantity.PREFILL_FIXED:
        return fit.fixed
    if quantity is Quantity.PREFILL_TOKEN:
        slope = fit.slope
        return Estimate(slope.value * tokens, slope.low * tokens, slope.high * tokens)
    by = fit.at(tokens) - fit.centre.value
    return Estimate(fit.at(tokens), fit.centre.low + by, fit.centre.high + by)


def _half_width(estimates: Sequence[Estimate]) -> float:
    """Of the median of several runs' figures: their intervals shrink with their number."""
    return median(one.half_width for one in estimates) / math.sqrt(len(estimates))
