"""When requests arrive: open loop, all of it drawn before a run begins. Knows no clock and no request."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count as numbers
from itertools import islice, takewhile
from typing import Literal

import numpy as np

DRAWN_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process of `rate` requests/s.

    gamma: gaps are gamma distributed of shape `burstiness`, as in vLLM's benchmark: 1 is Poisson, lower is burstier,
    the gaps' coefficient of variation being 1 / √burstiness. ramp: Poisson arrivals whose rate goes linearly from
    `rate` to `end_rate` over the duration. A rate of `math.inf` (not with ramp) means all at once.

    Raises:
        ValueError: a rate or the burstiness is out of range, or is not one of this kind.
    """

    kind: Literal["poisson", "gamma", "constant", "ramp"]
    rate: float
    burstiness: float = 1.0
    end_rate: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("poisson", "gamma", "constant", "ramp"):
            raise ValueError(f"no such kind of arrivals: {self.kind!r} (known: poisson, gamma, constant, ramp)")
        if self.kind != "ramp" and not self.rate > 0:
            raise ValueError(f"the request rate must be above 0, not {self.rate}")
        if not 0 < self.burstiness < math.inf:
            raise ValueError(f"burstiness must be above 0 and finite, not {self.burstiness}")
        if self.burstiness != 1 and self.kind != "gamma":
            raise ValueError(f"burstiness {self.burstiness} needs gamma arrivals, not {self.kind}")
        if (self.end_rate is not None) != (self.kind == "ramp"):
            raise ValueError("a ramp has an end rate, and nothing else has")
        if self.end_rate is not None:
            _check_ramp(self.rate, self.end_rate)

    @property
    def mean_rate(self) -> float:
        """Requests/s over the whole duration."""
        return self.rate if self.end_rate is None else (self.rate + self.end_rate) / 2

    def scaled(self, factor: float) -> "Arrivals":
        """Rates times `factor`: of one seed, the same arrivals in a time shorter by it."""
        if not 0 < factor < math.inf:
            raise ValueError(f"the rate factor must be above 0 and finite, not {factor}")
        end_rate = None if self.end_rate is None else self.end_rate * factor
        return replace(self, rate=self.rate * factor, end_rate=end_rate)


def _check_ramp(rate: float, end_rate: float) -> None:
    if not (0 <= rate < math.inf and 0 <= end_rate < math.inf and rate + end_rate > 0):
        raise ValueError(f"a ramp needs finite rates of at least 0, not both 0, and not {rate} to {end_rate}")


def arrival_times(arrivals: Arrivals, duration_s: float, seed: int) -> list[float]:
    """Rising, in [0, `duration_s`). Constant arrivals begin at 0; the others are under way when the run begins, so that
    their mean number is rate × duration exactly.

    Raises:
        ValueError: a rate or a duration without end, a duration of 0, or a negative seed.
    """
    if not 0 < duration_s < math.inf:
        raise ValueError(f"the duration must be above 0 s and finite, not {duration_s}")
    if math.isinf(arrivals.rate):
        raise ValueError("requests that all come at once need a number of requests, not a duration")
    num_expected = arrivals.mean_rate * duration_s
    unit_times = takewhile(lambda time: time < num_expected, _unit_times(arrivals, seed))
    times = (_to_seconds(arrivals, duration_s, time) for time in unit_times)
    return [time_s for time_s in times if time_s < duration_s]


def first_arrivals(arrivals: Arrivals, count: int, seed: int) -> list[float]:
    """Exactly `count` arrivals, rising. A ramp lasts as long as it takes for `count` to be its mean number; given their
    number, its arrivals are independent draws, sorted.

    Raises:
        ValueError: `count` or the seed is negative.
    """
    if count < 0:
        raise ValueError(f"the number of requests must not be negative, as {count} is")
    if math.isinf(arrivals.rate):
        return [0.0] * count
    if arrivals.kind != "ramp":
        return [time / arrivals.rate for time in islice(_unit_times(arrivals, seed), count)]
    drawn: list[float] = np.sort(np.random.default_rng(seed).random(count) * count).tolist()
    return [_to_seconds(arrivals, count / arrivals.mean_rate, time) for time in drawn]


def _unit_times(arrivals: Arrivals, seed: int) -> Iterator[float]:
    """A renewal process of rate 1, without end.

    The first gap is what is left of one that began before time 0: a uniform part of a length-biased gap, which for
    gamma gaps is one of shape + 1 (D. R. Cox, Renewal Theory, 1962, section 5.4).
    """
    if arrivals.kind == "constant":
        yield from map(float, numbers())
    rng, shape = np.random.default_rng(seed), arrivals.burstiness
    time = float(rng.random() * rng.standard_gamma(shape + 1) / shape)
    yield time
    while True:
        gaps: list[float] = (rng.standard_gamma(shape, DRAWN_AT_ONCE) / shape).tolist()
        for gap in gaps:
            time += gap
            yield time


def _to_seconds(arrivals: Arrivals, duration_s: float, unit_time: float) -> float:
    """When the mean number of arrivals so far is `unit_time`, so that arrivals of rate 1 become those of the set rate.

    For a ramp this is the time change of an inhomogeneous Poisson process (E. Çinlar, Introduction to Stochastic
    Processes, 1975, chapter 4.7): rate·t + slope·t²/2 = unit_time, solved in the form that holds at slope 0.
    """
    if arrivals.end_rate is None:
        return unit_time / arrivals.rate
    slope = (arrivals.end_rate - arrivals.rate) / duration_s
    root = math.sqrt(max(0.0, arrivals.rate**2 + 2 * slope * unit_time))
    return 2 * unit_time / (arrivals.rate + root) if unit_time else 0.0
