"""The highest request rate that a server still serves well: bracketed, then bisected. Sends nothing itself."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

Measure = Callable[[float, int], Awaitable[float | None]]
"""(rate in requests/s, repeat from 0) to goodput, 0 to 1; None: the search was interrupted."""

_STEP = 2.0
"""Between neighbouring rates while no bracket is known."""


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """Rates in requests/s. Ends once a rate that passes and one that fails are within `tolerance` of each other."""

    start_rate: float = 1.0
    min_rate: float = 0.01
    max_rate: float = 1000.0
    threshold: float = 0.95
    """A run passes if its goodput is at least this."""
    tolerance: float = 0.05
    max_probes: int = 20
    repeats: int = 3
    """Of every probe; the majority of them decides."""

    def __post_init__(self) -> None:
        """ValueError: rates out of order, or a figure out of its range."""
        if not 0 < self.min_rate <= self.start_rate <= self.max_rate < math.inf:
            raise ValueError(
                f"rates must rise from above 0: min {self.min_rate:g}, start {self.start_rate:g}, max {self.max_rate:g}"
            )
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold {self.threshold:g} is not in (0, 1]")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance {self.tolerance:g} is not in (0, 1)")
        if self.repeats < 1 or self.repeats % 2 == 0:
            raise ValueError(f"{self.repeats} repeats can be a tie: expected an odd number")
        if self.max_probes < 1:
            raise ValueError(f"{self.max_probes} probes: expected at least 1")


@dataclass(frozen=True, slots=True)
class Probe:
    """One rate, and for each repeat whether it passed."""

    rate: float
    votes: tuple[bool, ...]

    @property
    def passed(self) -> bool:
        return sum(self.votes) * 2 > len(self.votes)

    @property
    def passed_share(self) -> float:
        return sum(self.votes) / len(self.votes)


@dataclass(slots=True)
class Bisection:
    """Which rate to try next. `record` takes any rate, one measured in an earlier run among them.

    Where a rate fails below one that passes, the lower one counts: what is found has no failure below it.
    """

    config: SearchConfig
    probes: list[Probe] = field(default_factory=list[Probe])

    def record(self, rate: float, passed_votes: Sequence[bool]) -> None:
        """ValueError: no votes, or a rate of 0 or less."""
        if not passed_votes or not rate > 0:
            raise ValueError(f"{len(passed_votes)} votes at {rate:g} requests/s: expected some, above 0")
        self.probes.append(Probe(rate, tuple(passed_votes)))

    @property
    def failing(self) -> float | None:
        """The lowest rate that failed."""
        return min((probe.rate for probe in self.probes if not probe.passed), default=None)

    @property
    def found(self) -> float | None:
        """The highest rate that passed with no failure below it; None: none did so far."""
        limit = math.inf if self.failing is None else self.failing
        return max((probe.rate for probe in self.probes if probe.passed and probe.rate < limit), default=None)

    @property
    def converged(self) -> bool:
        """`found` is the answer to within the tolerance."""
        return self.found is not None and self.failing is not None and self._close(self.found, self.failing)

    @property
    def at_max(self) -> bool:
        """Nothing failed up to the highest rate allowed: the answer lies above."""
        return self.failing is None and self.found is not None and self.found >= self.config.max_rate

    @property
    def inconsistencies(self) -> list[tuple[Probe, Probe]]:
        """(lower, higher) rate of which the higher passed more often: noise, or a server that changes by itself."""
        by_rate = sorted(self.probes, key=lambda probe: probe.rate)
        pairs = ((low, high) for index, low in enumerate(by_rate) for high in by_rate[index + 1 :])
        return [(low, high) for low, high in pairs if low.rate < high.rate and low.passed_share < high.passed_share]

    def next_rate(self) -> float | None:
        """Requests/s; None: there is nothing more to learn, or as many probes as allowed were made."""
        if len(self.probes) >= self.config.max_probes or self.converged:
            return None
        passing, failing = self.found, self.failing
        if passing is not None and failing is not None:
            return math.sqrt(passing * failing)
        if failing is not None:
            return max(failing / _STEP, self.config.min_rate) if failing > self.config.min_rate else None
        if passing is not None:
            return min(passing * _STEP, self.config.max_rate) if passing < self.config.max_rate else None
        return self.config.start_rate

    def _close(self, passing: float, failing: float) -> bool:
        return failing <= passing * (1 + self.config.tolerance)


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a search."""

    rate: float
    repeat: int
    goodput: float
    passed: bool


@dataclass(frozen=True, slots=True)
class Found:
    """`rate` None: every rate failed. `failing_rate` None: every rate passed. `interrupted`: cut short, so `rate` is
    the best so far."""

    rate: float | None
    failing_rate: float | None
    converged: bool
    interrupted: bool
    trials: tuple[Trial, ...]
    inconsistencies: tuple[str, ...]


async def search(config: SearchConfig, measure: Measure, note: Callable[[Trial], None]) -> Found:
    """Probe rates until the answer is known. A probe ends as soon as the rest of its repeats cannot change it."""
    bisection, trials, interrupted = Bisection(config), list[Trial](), False
    while not interrupted and (rate := bisection.next_rate()) is not None:
        votes: list[bool] = []
        while not _decided(votes, config.repeats):
            goodput = await measure(rate, len(votes))
            if goodput is None:
                interrupted = True
                break
            trials.append(Trial(rate, len(votes), goodput, goodput >= config.threshold))
            votes.append(trials[-1].passed)
            note(trials[-1])
        if not interrupted:
            bisection.record(rate, votes)
    return Found(
        rate=bisection.found,
        failing_rate=bisection.failing,
        converged=bisection.converged,
        interrupted=interrupted,
        trials=tuple(trials),
        inconsistencies=tuple(_told(low, high) for low, high in bisection.inconsistencies),
    )


def _decided(votes: Sequence[bool], repeats: int) -> bool:
    return max(sum(votes), len(votes) - sum(votes)) * 2 > repeats


def _told(low: Probe, high: Probe) -> str:
    low_votes, high_votes = (f"{sum(probe.votes)} of {len(probe.votes)}" for probe in (low, high))
    return f"{low_votes} runs passed at {low.rate:.4g} requests/s, yet {high_votes} at {high.rate:.4g}"
