"""Disaggregate or not, in plain words: from judged figures, what changed between the fleets, and what was the limit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pdserve_bench.compare.attribution import Finding
from pdserve_bench.compare.limiting import Limit
from pdserve_bench.compare.phases import Phase
from pdserve_bench.measures.summary import Slo


class JudgedFigure(StrEnum):
    """Goodput decides where it differs: it is what the SLO makes of TTFT and ITL together."""

    GOODPUT = "goodput"
    ITL_P99 = "p99 ITL"
    TTFT_P99 = "p99 TTFT"
    THROUGHPUT = "output throughput"


_UNITS = {
    JudgedFigure.GOODPUT: "of offered requests",
    JudgedFigure.ITL_P99: "ms",
    JudgedFigure.TTFT_P99: "ms",
    JudgedFigure.THROUGHPUT: "tokens/s",
}
_LATENCIES = frozenset({JudgedFigure.ITL_P99, JudgedFigure.TTFT_P99})


@dataclass(frozen=True, slots=True)
class FigureJudgement:
    """Disaggregated against colocated. `ratio`: disaggregated ÷ colocated, median of the repeats, not negative;
    `band`: how far from 1 the A/A control's ratios reach. The two values, where given: seconds, a share, or tokens/s.
    """

    figure: JudgedFigure
    verdict: Literal["better", "worse", "none"]
    ratio: float
    band: float
    colocated: float | None = None
    disaggregated: float | None = None


class Decision(StrEnum):
    DISAGGREGATE = "disaggregate"
    COLOCATE = "colocate"
    NO_DIFFERENCE = "no difference"
    DEPENDS = "depends"


@dataclass(frozen=True, slots=True)
class Setting:
    """What was compared. `chunk`: prompt tokens in a step of the prefill worker; `colocated`: that fleet, in words."""

    num_prefill: int
    num_decode: int
    chunk: int
    colocated: str
    slo: Slo


@dataclass(frozen=True, slots=True)
class Conclusion:
    """`headline` is the answer, `figures` a sentence each, `reasons` why it came out so."""

    decision: Decision
    headline: str
    figures: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join((self.headline, *self.figures, *self.reasons))


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known of the why: findings with colocated as the baseline, and each fleet's limit."""

    findings: Sequence[Finding] = ()
    colocated_limit: Limit | None = None
    disaggregated_limit: Limit | None = None


_EXPLAINED_BY = {
    JudgedFigure.TTFT_P99: (Phase.QUEUE, Phase.RESERVE, Phase.PREFILL_WAIT, Phase.PREFILL),
    JudgedFigure.ITL_P99: (Phase.TRANSFER, Phase.DECODE, Phase.STREAMING),
    JudgedFigure.GOODPUT: tuple(Phase),
    JudgedFigure.THROUGHPUT: tuple(Phase),
}


def decide(judgements: Sequence[FigureJudgement]) -> Decision:
    """By goodput if it differs; else by the latencies, if they agree. Output follows the load in an open loop.

    Raises:
        ValueError: nothing was judged.
    """
    if not judgements:
        raise ValueError("a verdict needs at least one judged figure")
    verdicts = {one.figure: one.verdict for one in judgements}
    by_goodput = verdicts.get(JudgedFigure.GOODPUT, "none")
    by_latency = {verdict for figure, verdict in verdicts.items() if figure in _LATENCIES}
    found = {by_goodput} if by_goodput != "none" else by_latency - {"none"}
    if not found:
        return Decision.NO_DIFFERENCE
    if len(found) > 1:
        return Decision.DEPENDS
    return Decision.DISAGGREGATE if found == {"better"} else Decision.COLOCATE


def conclude(judgements: Sequence[FigureJudgement], setting: Setting, why: Explanation | None = None) -> Conclusion:
    """The answer for this load on this machine.

    Raises:
        ValueError: nothing was judged.
    """
    decision, why = decide(judgements), why or Explanation()
    ordered = sorted(judgements, key=lambda one: list(JudgedFigure).index(one.figure))
    return Conclusion(
        decision=decision,
        headline=_headline(decision, ordered, setting),
        figures=tuple(_figure_sentence(one) for one in ordered),
        reasons=tuple(_reasons(ordered, why)),
    )


def _headline(decision: Decision, judgements: Sequence[FigureJudgement], setting: Setting) -> str:
    slo = f"TTFT ≤ {setting.slo.ttft_s:g} s and ITL ≤ {setting.slo.itl_s * 1000:g} ms"
    apart = f"{setting.num_prefill} prefill : {setting.num_decode} decode, chunk {setting.chunk}"
    against = f"against {setting.colocated}, at {slo}"
    better, worse = _names(judgements, "better"), _names(judgements, "worse")
    match decision:
        case Decision.DISAGGREGATE:
            price = f"; the price is {worse}" if worse else ""
            return f"Yes: disaggregate ({apart}; {against}), because {better} {_is(better)} better{price}."
        case Decision.COLOCATE:
            gain = f", though {better} {_is(better)} better apart" if better else ""
            return f"No: colocated is better here ({apart}; {against}), because {worse} {_is(worse)} worse apart{gain}."
        case Decision.NO_DIFFERENCE:
            return f"No difference beyond the noise ({apart}; {against}): nothing speaks for disaggregating."
        case Decision.DEPENDS:
            equal = any(one.figure is JudgedFigure.GOODPUT for one in judgements)
            return (
                f"It depends on what counts ({apart}; {against}): apart, {better} {_is(better)} better and "
                f"{worse} {_is(worse)} worse{', and goodput does not differ' if equal else ''}."
            )


def _names(judgements: Sequence[FigureJudgement], verdict: str) -> str:
    return " and ".join(one.figure for one in judgements if one.verdict == verdict)


def _is(names: str) -> str:
    return "are" if " and " in names else "is"


def _figure_sentence(one: FigureJudgement) -> str:
    values = ""
    if one.colocated is not None and one.disaggregated is not None:
        values = f": {_value(one, one.disaggregated)} apart against {_value(one, one.colocated)} colocated"
    name, band = f"{one.figure[0].upper()}{one.figure[1:]}", f"noise ±{one.band:.0%}"
    if not math.isfinite(one.band):
        band = "noise without bound"
    if one.verdict == "none":
        return f"{name} does not differ beyond the noise{values} ({one.ratio:.2f} times; {band})."
    return f"{name} is {_times(one.ratio)}, {one.verdict} apart{values} ({band})."


def _times(ratio: float) -> str:
    """A ratio to or from nothing has no size."""
    direction = "higher" if ratio > 1 else "lower"
    size = max(ratio, 1 / ratio) if ratio > 0 else math.inf
    return f"{size:.2f} times {direction}" if math.isfinite(size) else direction


def _value(one: FigureJudgement, value: float) -> str:
    unit = _UNITS[one.figure]
    if one.figure in _LATENCIES:
        return f"{value * 1000:,.0f} {unit}"
    return f"{value:.0%} {unit}" if one.figure is JudgedFigure.GOODPUT else f"{value:,.1f} {unit}"


def _reasons(judgements: Sequence[FigureJudgement], why: Explanation) -> list[str]:
    """What explains each figure that differs, the largest first, each once; then the limits.

    A figure that is better apart is explained by what shrank, a worse one by what grew.
    """
    explained = {
        (phase, one.verdict == "worse")
        for one in judgements
        if one.verdict != "none"
        for phase in _EXPLAINED_BY[one.figure]
    }
    findings = [one for one in why.findings if (one.phase, one.amount_s > 0) in explained and one.follows_from is None]
    findings.sort(key=lambda one: abs(one.amount_s), reverse=True)
    found = [f"From colocated to apart: {one.sentence}" for one in findings]
    limits = (("Colocated", why.colocated_limit), ("Apart", why.disaggregated_limit))
    found += [f"{fleet}: {limit.sentence}" for fleet, limit in limits if limit is not None]
    return found
