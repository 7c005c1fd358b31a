"""From a comparison's measurements to an answer at each rate: what differs, why, and what the load asks for. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import cast

from pdserve_bench.compare.attribution import Finding, compare_phases, time_shares
from pdserve_bench.compare.comparison import ComparisonResult, Judgement, Measurement
from pdserve_bench.compare.demand import ClassDemand, Demand, WorkerRates, class_demand
from pdserve_bench.compare.limiting import Limit, Resource, limiting_resource
from pdserve_bench.compare.noise import Band
from pdserve_bench.compare.phases import Phase, phase_times
from pdserve_bench.compare.schedule import AGAIN
from pdserve_bench.compare.verdict import Conclusion, Explanation, FigureJudgement, JudgedFigure, Setting, conclude
from pdserve_bench.load.records import RequestRecord, RunResult


@dataclass(frozen=True, slots=True)
class Answer:
    """At one rate. `shares`: by fleet, each phase's share of the requests' time. `demand` None: nothing was completed.

    `conclusion` None: no figure could be judged.
    """

    rate_factor: float
    conclusion: Conclusion | None
    findings: tuple[Finding, ...]
    limits: Mapping[str, Limit]
    shares: Mapping[str, Mapping[Phase, float]]
    demand: Demand | None


def answer(result: ComparisonResult, apart: str, setting: Setting, rate_factor: float) -> Answer:
    """Of the fleet `apart` against the baseline, which is colocated."""
    ours, others = _runs(result, rate_factor, apart), _runs(result, rate_factor, result.baseline)
    again = _runs(result, rate_factor, result.baseline + AGAIN)
    findings = compare_phases(others, ours, again) if _is_timed(ours) and _is_timed(others) else []
    both = {name: runs for name, runs in ((result.baseline, others), (apart, ours)) if runs}
    limits = {name: _limit(runs, _cores(result.described.get(name, {}))) for name, runs in both.items()}
    judged = [_judged(result, one) for one in result.judgements if (one.fleet, one.rate_factor) == (apart, rate_factor)]
    found = [one for one in judged if one is not None]
    why = Explanation(findings, limits.get(result.baseline), limits.get(apart))
    return Answer(
        rate_factor=rate_factor,
        conclusion=conclude(found, setting, why) if found else None,
        findings=tuple(findings),
        limits=limits,
        shares={name: time_shares(*runs) for name, runs in both.items()},
        demand=demand_of(ours) if ours else None,
    )


def demand_of(runs: Sequence[RunResult]) -> Demand | None:
    """What the load asked for, beside what a CPU second of each pool did in these runs of a disaggregated fleet."""
    records = [record for run in runs for record in run.records]
    span_s = sum(_span_s(run) for run in runs)
    rates = _rates(runs)
    classes = sorted({record.request_class for record in records})
    if rates is None or not classes or not span_s > 0:
        return None
    return Demand(tuple(_class(name, records, span_s) for name in classes), rates)


def _class(name: str, records: Sequence[RequestRecord], span_s: float) -> ClassDemand:
    rows = [
        (record.num_prompt_tokens, record.max_tokens, record.e2e_s or 0.0)
        for record in records
        if record.request_class == name
    ]
    return class_demand(name, rows, span_s)


def _rates(runs: Sequence[RunResult]) -> WorkerRates | None:
    """Tokens of a phase ÷ CPU seconds of its pool: what a core does when it is busy, at this load's batch sizes."""
    prompts = sum(record.num_prompt_tokens for run in runs for record in run.records if record.events)
    outputs = sum(max(0, record.num_counted_tokens - 1) for run in runs for record in run.records)
    prefill_s, decode_s = (_cpu_s(runs, role) for role in ("prefill", "decode"))
    if not (prompts and outputs and prefill_s and decode_s):
        return None
    return WorkerRates(prompts / prefill_s, outputs / decode_s)


def _cpu_s(runs: Sequence[RunResult], role: str) -> float:
    return sum(
        seconds
        for run in runs
        for name, seconds in run.server_cpu_s.items()
        if name.rpartition(".")[2].startswith(role)
    )


def _span_s(run: RunResult) -> float:
    """In which requests arrived; the wait for the last answers asks for nothing more."""
    return float(str(run.about.get("duration_s", run.duration_s)))


def _limit(runs: Sequence[RunResult], cores: Mapping[str, float]) -> Limit:
    """The first that any of the runs met."""
    found = [limiting_resource(run, cores) for run in runs]
    return next((limit for limit in found if limit.resource is not Resource.NONE), found[0])


def _is_timed(runs: Sequence[RunResult]) -> bool:
    return any(phase_times(run.records) for run in runs)


def _runs(result: ComparisonResult, rate_factor: float, label: str) -> list[RunResult]:
    return [one.run for one in measured(result, rate_factor, label)]


def measured(result: ComparisonResult, rate_factor: float, label: str) -> list[Measurement]:
    """Of one fleet, or of the control's second turns, in order of the repeats."""
    return result.by_rate.get(rate_factor, {}).get(label, [])


def _cores(described: Mapping[str, object]) -> dict[str, float]:
    pinning = cast(Mapping[str, Sequence[int]], described.get("pinning", {}))
    return {process: float(len(cores)) for process, cores in pinning.items()}


def _judged(result: ComparisonResult, one: Judgement) -> FigureJudgement | None:
    noise = result.band(one.figure)
    if one.verdict is None or noise is None:
        return None
    values = [_middle(result, one, label) for label in (result.baseline, one.fleet)]
    return FigureJudgement(
        figure=JudgedFigure(one.figure.name),
        verdict=one.verdict.word,
        ratio=one.verdict.median,
        band=_width(noise),
        colocated=values[0],
        disaggregated=values[1],
    )


def _middle(result: ComparisonResult, one: Judgement, label: str) -> float | None:
    values = [one.figure.read(each.summary) for each in measured(result, one.rate_factor, label)]
    found = [value for value in values if value is not None]
    return median(found) if found else None


def _width(noise: Band) -> float:
    return noise.high - 1 if math.isfinite(noise.high) else math.inf
