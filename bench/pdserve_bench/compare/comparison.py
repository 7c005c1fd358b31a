"""What a comparison found: its measurements, the noise between the control's two turns, and judgements. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from pdserve_bench.compare.noise import FIGURES, FLOOR, Band, Figure, Pair, Verdict, band, judge, ratios_of
from pdserve_bench.compare.schedule import AGAIN, Cell
from pdserve_bench.foreign_cpu import MAX_FOREIGN_CORES
from pdserve_bench.load.records import RunResult
from pdserve_bench.measures.summary import Slo, Summary

REQUESTS = 1.5
"""So many of the offered ones make no difference in a share of requests."""


@dataclass(frozen=True, slots=True)
class Measurement:
    cell: Cell
    run: RunResult
    summary: Summary

    @property
    def noisy(self) -> bool:
        """Others disturbed every try of it."""
        return self.run.foreign_cores > MAX_FOREIGN_CORES


@dataclass(frozen=True, slots=True)
class Judgement:
    """One fleet's figure against the baseline's at one rate. `ratios`: one for each round that has both.

    `verdict` None: it cannot be judged, for want of ratios or of a band.
    """

    figure: Figure
    fleet: str
    rate_factor: float
    ratios: tuple[float, ...]
    verdict: Verdict | None


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """`baseline`: what the others are held against, and the control of the A/A pairs. `described`: the fleets.

    `plans`: how each rate's were made. `interrupted`: not all that was asked for was measured.
    """

    baseline: str
    slo: Slo
    measured: tuple[Measurement, ...]
    described: Mapping[str, Mapping[str, object]] = field(default_factory=dict[str, Mapping[str, object]])
    plans: Mapping[float, Sequence[Mapping[str, object]]] = field(
        default_factory=dict[float, Sequence[Mapping[str, object]]]
    )
    interrupted: bool = False

    @property
    def rate_factors(self) -> list[float]:
        return sorted({one.cell.rate_factor for one in self.measured})

    @property
    def fleets(self) -> list[str]:
        """Without the control's second turns, the baseline first."""
        names = dict.fromkeys([self.baseline, *sorted(one.cell.fleet for one in self.measured)])
        return list(names)

    @property
    def by_rate(self) -> dict[float, dict[str, list[Measurement]]]:
        """By rate and by fleet, the control's second turns under a name of their own, in order of their repeats."""
        found: dict[float, dict[str, list[Measurement]]] = {}
        for one in sorted(self.measured, key=lambda one: (one.cell.rate_factor, one.cell.label, one.cell.repeat)):
            found.setdefault(one.cell.rate_factor, {}).setdefault(one.cell.label, []).append(one)
        return found

    @property
    def foreign_cores(self) -> float:
        """The most that others took during any measurement."""
        return max((one.run.foreign_cores for one in self.measured), default=0.0)

    def noise_of(self, rate_factor: float, *fleets: str) -> float:
        """The most that others took while these were measured at one rate."""
        cells = (one for one in self.measured if one.cell.rate_factor == rate_factor and one.cell.fleet in fleets)
        return max((one.run.foreign_cores for one in cells), default=0.0)

    def pairs(self, figure: Figure, fleet: str, rate_factor: float) -> list[Pair]:
        """`fleet`'s and the baseline's, of each round that has both; the baseline's is the mean of its turns."""
        rounds = self.by_rate.get(rate_factor, {})
        ours = {one.cell.repeat: figure.read(one.summary) for one in rounds.get(fleet, [])}
        others: dict[int, list[float]] = {}
        for label in (self.baseline, self.baseline + AGAIN):
            for one in rounds.get(label, []):
                if (value := figure.read(one.summary)) is not None:
                    others.setdefault(one.cell.repeat, []).append(value)
        return [(ours[repeat], fmean(others[repeat])) for repeat in sorted(ours.keys() & others.keys())]

    def control_pairs(self, figure: Figure) -> list[Pair]:
        """Second turn and first of the baseline, in every round of every rate."""
        return [
            pair
            for rate_factor in self.rate_factors
            for pair in self._pairs(
                figure, Cell(rate_factor, 0, self.baseline, again=True), Cell(rate_factor, 0, self.baseline)
            )
        ]

    def band(self, figure: Figure) -> Band | None:
        """None: no A/A pair has this figure. Shares of requests are known to a request or two at best."""
        ratios = ratios_of(self.control_pairs(figure))
        if not ratios:
            return None
        fewest = min(one.summary.offered for one in self.measured)
        return band(ratios, max(FLOOR, REQUESTS / max(1, fewest)) if figure.counts_requests else FLOOR)

    def judgement(self, figure: Figure, fleet: str, rate_factor: float) -> Judgement:
        ratios, noise = ratios_of(self.pairs(figure, fleet, rate_factor)), self.band(figure)
        verdict = judge(ratios, noise, lower_is_better=figure.lower_is_better) if ratios and noise else None
        return Judgement(figure, fleet, rate_factor, tuple(ratios), verdict)

    @property
    def judgements(self) -> list[Judgement]:
        return [
            self.judgement(figure, fleet, rate_factor)
            for rate_factor in self.rate_factors
            for fleet in self.fleets
            if fleet != self.baseline
            for figure in FIGURES
        ]

    def _pairs(self, figure: Figure, first: Cell, second: Cell) -> list[Pair]:
        """Of two turns within the rounds of one rate; `repeat` of the cells counts for nothing."""
        rounds = self.by_rate.get(first.rate_factor, {})
        ours = {one.cell.repeat: figure.read(one.summary) for one in rounds.get(first.label, [])}
        others = {one.cell.repeat: figure.read(one.summary) for one in rounds.get(second.label, [])}
        return [(ours[repeat], others[repeat]) for repeat in sorted(ours.keys() & others.keys())]
