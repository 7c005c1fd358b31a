"""Which phase changed between two sets of runs, by how much, and what merely follows from it. Measures nothing.

A change is named if it exceeds what the baseline's own repeats differ by, the sampling noise within the runs, and a
floor below which nobody would care.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pdserve_bench.compare.phase_changes import PHASES, Change, Comparison, Quantity
from pdserve_bench.compare.phases import Phase, PhaseFigures, phase_figures, phase_times
from pdserve_bench.load.records import RunResult

PART_SHARE = 0.25
"""A part of the prefill's time is named if it made at least this share of the whole's change, in its direction."""
TWICE = (1.75, 2.25)
"""Ratios that are called double; their inverses, half."""
STEPS_PER_TRANSFER = 3
"""A transfer's blocks are allocated, its commit is taken and its sequence joins the batch between decode steps, so that
it waits for the end of as many."""

_WAITING = frozenset({Phase.QUEUE, Phase.RESERVE, Phase.PREFILL_WAIT})
_PARTS = (Quantity.PREFILL_FIXED, Quantity.PREFILL_TOKEN)
_WHOLE = (
    Quantity.TRANSFER,
    Quantity.DECODE_TOKEN,
    Quantity.STREAMING,
    Quantity.QUEUE,
    Quantity.RESERVE,
    Quantity.PREFILL_WAIT,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One phase that changed.

    `amount_s`: subject less baseline, in what `quantity` counts: per prefill, token or request (`PREFILL_TOKEN`: over
    the median prompt). `ratio`: subject ÷ baseline, None where the baseline has next to nothing. `kind`: what happened,
    in a few words; `sentence`: all of it. `follows_from`: the phase whose change explains this one; None: a cause.
    """

    phase: Phase
    quantity: Quantity
    kind: str
    amount_s: float
    ratio: float | None
    sentence: str
    follows_from: Phase | None = None


def compare_phases(
    baseline: Sequence[RunResult], subject: Sequence[RunResult], control: Sequence[RunResult] = ()
) -> list[Finding]:
    """What changed from the baseline's runs to the subject's, causes first, then what follows from them.

    Args:
        control: more runs of what the baseline is (the A/A control); they widen the noise, and move no figure.

    Raises:
        ValueError: either side has no completed request with the server's timings.
    """
    before, after = _figures(baseline), _figures(subject)
    for side, found in (("baseline", before), ("subject", after)):
        if not found:
            raise ValueError(f"no completed request of the {side} carries the server's timings")
    comparison = Comparison(before, after, _figures(control))
    findings = _explained([_finding(change) for change in _changes(comparison)])
    return sorted(findings, key=lambda finding: finding.follows_from is not None)


def causes(findings: Sequence[Finding]) -> list[Finding]:
    """Those that follow from no other."""
    return [finding for finding in findings if finding.follows_from is None]


def time_shares(*runs: RunResult) -> dict[Phase, float]:
    """Each phase's share of all completed requests' E2E, counted from the send; they add up to 1. Empty: no timings.

    Every run's requests are told apart by themselves: who waited for whom is known within a run only.
    """
    times = [one for run in runs for one in phase_times(run.records)]
    total_s = sum(one.e2e_s for one in times)
    if total_s <= 0:
        return {}
    return {phase: sum(one.seconds[phase] for one in times) / total_s for phase in Phase}


def _figures(runs: Sequence[RunResult]) -> list[PhaseFigures]:
    found = (phase_figures(phase_times(run.records)) for run in runs)
    return [figures for figures in found if figures.count]


def _changes(comparison: Comparison) -> Iterator[Change]:
    """Those that count; of the prefill's, the parts that made it, or the whole if none stands out."""
    whole = comparison.change(Quantity.PREFILL_TIME)
    if whole is not None and whole.counts:
        parts = [change for quantity in _PARTS if (change := comparison.change(quantity)) is not None]
        yield from [part for part in parts if part.counts and _made(part, whole)] or [whole]
    for quantity in _WHOLE:
        change = comparison.change(quantity)
        if change is not None and change.counts:
            yield change


def _made(part: Change, whole: Change) -> bool:
    return part.amount_s / whole.amount_s >= PART_SHARE


def _explained(findings: Sequence[Finding]) -> list[Finding]:
    return [replace(finding, follows_from=_cause_of(finding, findings)) for finding in findings]


def _cause_of(finding: Finding, findings: Sequence[Finding]) -> Phase | None:
    """Waits grow with the service they wait for, and an exposed transfer with the decode steps it falls between."""
    alike = [other for other in findings if (other.amount_s > 0) == (finding.amount_s > 0)]
    if finding.phase is Phase.TRANSFER:
        step_s = sum(abs(other.amount_s) for other in alike if other.phase is Phase.DECODE)
        return Phase.DECODE if step_s and abs(finding.amount_s) <= STEPS_PER_TRANSFER * step_s else None
    if finding.phase not in _WAITING:
        return None
    served_by = (Phase.PREFILL, Phase.DECODE, Phase.TRANSFER)[: 1 if finding.phase is Phase.PREFILL_WAIT else 3]
    return next((phase for phase in served_by if any(other.phase is phase for other in alike)), None)


def _finding(change: Change) -> Finding:
    kind = _kind(change)
    times = "" if change.ratio is None or change.quantity is Quantity.PREFILL_FIXED else f", {change.ratio:.2f} times"
    of = " at the median prompt" if change.quantity is Quantity.PREFILL_TOKEN else ""
    sentence = (
        f"{kind[0].upper()}{kind[1:]}: {_ms(change.before_s)} before, {_ms(change.after_s)} now{of}{times} "
        f"(noise ±{_ms(change.noise_s)})."
    )
    return Finding(PHASES[change.quantity], change.quantity, kind, change.amount_s, change.ratio, sentence)


def _kind(change: Change) -> str:
    ratio, grew = change.ratio, "grew" if change.amount_s > 0 else "shrank"
    by = f"{grew} by {_ms(abs(change.amount_s))}"
    if ratio is None or change.quantity is Quantity.PREFILL_FIXED:
        return f"{change.quantity} {by}"
    doubled, halved = TWICE[0] <= ratio <= TWICE[1], TWICE[0] <= 1 / max(ratio, 1e-9) <= TWICE[1]
    if change.quantity is Quantity.DECODE_TOKEN:
        rate = "halved" if doubled else "doubled" if halved else f"changed to {1 / max(ratio, 1e-9):.2f} times"
        return f"per-token decode rate {rate}"
    if doubled or halved:
        return f"{change.quantity} {'doubled' if doubled else 'halved'}"
    return f"{change.quantity} {by}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.{0 if abs(seconds) >= 0.1 else 1}f} ms"
