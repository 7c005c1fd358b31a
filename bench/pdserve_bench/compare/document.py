"""A comparison for machines and people: its JSON, its targets and its tables. Measures and judges nothing."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import cast

from rich.table import Table

from pdserve_bench.compare.comparison import ComparisonResult, Judgement, Measurement
from pdserve_bench.compare.noise import FIGURES, ratios_of
from pdserve_bench.compare.schedule import AGAIN
from pdserve_bench.conditions import conditions
from pdserve_bench.measures.summarise import summary_to_json
from pdserve_bench.measures.tables import milliseconds
from pdserve_bench.report import new_table, noise_mark
from pdserve_bench.report import result as result_file
from pdserve_bench.targets import Target

MIN_ITL_RATIO, MIN_GOODPUT_RATIO = 4.0, 1.5
_ITL = next(figure for figure in FIGURES if figure.name == "p99 ITL")


def targets(result: ComparisonResult, fleet: str) -> list[Target]:
    """Of a disaggregated fleet against a colocated baseline, under long prompts.

    At every rate: p99 ITL, by the median over the rounds. Goodput: at the best of the rates, as where both fleets, or
    neither, serve everybody, it cannot differ; good requests of all rounds together, none of the baseline's as one.
    Against each other fleet, a peer, at every rate: better in both.
    """
    found: list[Target] = []
    goodputs: dict[float, float] = {}
    for rate_factor in result.rate_factors:
        noise = result.noise_of(rate_factor, fleet, result.baseline)
        judgement = result.judgement(_ITL, fleet, rate_factor)
        if judgement.verdict is not None and judgement.verdict.median > 0:
            times = 1 / judgement.verdict.median
            name = f"p99 ITL at rate x{rate_factor:g}, {result.baseline} / {fleet}"
            found.append(Target(name, "ratio", ">=", times, MIN_ITL_RATIO, noise))
        if (ratio := _goodput_ratio(result, fleet, rate_factor)) is not None:
            goodputs[rate_factor] = ratio
    if goodputs:
        rate_factor = max(goodputs, key=lambda rate: goodputs[rate])
        noise = result.noise_of(rate_factor, fleet, result.baseline)
        name = f"goodput, best rate x{rate_factor:g}, {fleet} / {result.baseline}"
        found.append(Target(name, "ratio", ">=", goodputs[rate_factor], MIN_GOODPUT_RATIO, noise))
    peers = [name for name in result.fleets if name not in (fleet, result.baseline)]
    return found + [
        one for peer in peers for rate in result.rate_factors for one in _against(result, fleet, peer, rate)
    ]


def _against(result: ComparisonResult, fleet: str, peer: str, rate_factor: float) -> Iterator[Target]:
    noise = result.noise_of(rate_factor, fleet, peer)
    rounds = result.by_rate[rate_factor]
    ours = {one.cell.repeat: one.summary.itl.p99 for one in rounds.get(fleet, [])}
    theirs = {one.cell.repeat: one.summary.itl.p99 for one in rounds.get(peer, [])}
    ratios = ratios_of((theirs[repeat], ours[repeat]) for repeat in sorted(ours.keys() & theirs.keys()))
    if ratios and math.isfinite(times := median(ratios)):
        yield Target(f"p99 ITL at rate x{rate_factor:g}, {peer} / {fleet}", "ratio", ">=", times, 1.0, noise)
    if (ratio := _goodput_ratio(result, fleet, rate_factor, peer)) is not None:
        yield Target(f"goodput at rate x{rate_factor:g}, {fleet} / {peer}", "ratio", ">=", ratio, 1.0, noise)


def _goodput_ratio(result: ComparisonResult, fleet: str, rate_factor: float, other: str = "") -> float | None:
    """To `other`, or the baseline. Where that has two turns, its count is their mean."""
    rounds, other = result.by_rate[rate_factor], other or result.baseline
    ours = {one.cell.repeat: one.summary.num_good for one in rounds.get(fleet, [])}
    turns: dict[int, list[int]] = {}
    for label in (other, other + AGAIN):
        for one in rounds.get(label, []):
            turns.setdefault(one.cell.repeat, []).append(one.summary.num_good)
    both = ours.keys() & turns.keys()
    if not both:
        return None
    return sum(ours[repeat] for repeat in both) / max(1.0, sum(fmean(turns[repeat]) for repeat in both))


def document(result: ComparisonResult, settings: Mapping[str, object], fleet: str) -> dict[str, object]:
    """The result file. The requests' records are not in it: the store has them.

    Args:
        settings: what else was chosen, the model's fingerprint among it.
        fleet: whose targets are held against the baseline.
    """
    chosen = {**settings, "fleets": dict(result.described), "slo": asdict(result.slo), "baseline": result.baseline}
    seeds = {
        f"rate {rate:g}, repeat {repeat}": int(str(about["seed"]))
        for rate, abouts in result.plans.items()
        for repeat, about in enumerate(abouts)
    }
    measured = {
        "interrupted": result.interrupted,
        "plans": [{"rate_factor": rate, "repeats": list(abouts)} for rate, abouts in result.plans.items()],
        "runs": [_run(one) for rounds in result.by_rate.values() for runs in rounds.values() for one in runs],
        "noise": [_noise(result, figure.name) for figure in FIGURES],
        "judgements": [_judgement(one) for one in result.judgements],
    }
    about = conditions(chosen, seeds, result.foreign_cores)
    return result_file("compare", about, measured, targets(result, fleet))


def _run(one: Measurement) -> dict[str, object]:
    return {
        **asdict(one.cell),
        "label": one.cell.label,
        "summary": summary_to_json(one.summary),
        "client": asdict(one.run.limits),
        "server_cpu_s": dict(one.run.server_cpu_s),
        "foreign_cores": one.run.foreign_cores,
        "noisy": one.noisy,
    }


def _noise(result: ComparisonResult, name: str) -> dict[str, object]:
    figure = next(one for one in FIGURES if one.name == name)
    noise = result.band(figure)
    limits = None if noise is None else {"low": noise.low, "high": _finite(noise.high)}
    return {"figure": name, "unit": figure.unit, "band": limits, "pairs": result.control_pairs(figure)}


def _judgement(one: Judgement) -> dict[str, object]:
    return {
        "figure": one.figure.name,
        "fleet": one.fleet,
        "rate_factor": one.rate_factor,
        "ratios": [_finite(ratio) for ratio in one.ratios],
        "median": None if one.verdict is None else _finite(one.verdict.median),
        "verdict": None if one.verdict is None else one.verdict.word,
    }


def _finite(ratio: float) -> float | None:
    """JSON knows no infinity: something against nothing."""
    return ratio if math.isfinite(ratio) else None


def tables(result: ComparisonResult) -> Iterator[Table]:
    """The pinning, every run, and what may be concluded."""
    yield pinning_table(result)
    for rate_factor in result.rate_factors:
        yield _runs_table(result, rate_factor)
    yield judgements_table(result)


def pinning_table(result: ComparisonResult) -> Table:
    table = new_table("Cores of every process", ("fleet", "process", "cores"), ())
    for fleet, described in result.described.items():
        pinning = cast(Mapping[str, Sequence[int]], described.get("pinning", {}))
        for process, cores in pinning.items():
            table.add_row(fleet, process, ", ".join(map(str, cores)))
    return table


def _runs_table(result: ComparisonResult, rate_factor: float) -> Table:
    numbers = ("repeat", "done", "goodput", "TTFT p50", "p99", "ITL p50", "p99", "tok/s", "foreign")
    table = new_table(f"Rate x{rate_factor:g}: milliseconds", ("fleet",), numbers)
    for label, runs in result.by_rate[rate_factor].items():
        for one in runs:
            summary = one.summary
            latencies = (summary.ttft.median, summary.ttft.p99, summary.itl.median, summary.itl.p99)
            table.add_row(
                label,
                str(one.cell.repeat + 1),
                f"{summary.completed}/{summary.offered}",
                f"{summary.goodput:.0%}",
                *(milliseconds(value) for value in latencies),
                f"{summary.output_throughput:.1f}",
                f"{one.run.foreign_cores:.2f}{noise_mark(one.run.foreign_cores)}",
            )
    return table


def judgements_table(result: ComparisonResult) -> Table:
    """A difference inside the noise band is called none."""
    table = new_table(f"Against {result.baseline}", ("rate", "fleet", "figure"), ("ratio", "noise band", "verdict"))
    bands = {figure: result.band(figure) for figure in FIGURES}
    for one in result.judgements:
        noise, verdict = bands[one.figure], one.verdict
        table.add_row(
            f"x{one.rate_factor:g}",
            one.fleet,
            one.figure.name,
            "–" if verdict is None else f"{verdict.median:.2f}",
            "–" if noise is None else f"{noise.low:.2f}–{noise.high:.2f}",
            "–" if verdict is None else verdict.word,
        )
    return table
