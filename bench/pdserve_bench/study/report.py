"""A study as files: a page, JSON, a row for each run, pictures. Measures and judges nothing."""

import csv
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import cast

from matplotlib.figure import Figure
from rich.table import Table

from pdserve_bench.compare.comparison import Measurement
from pdserve_bench.compare.demand import demand_sentence, demand_table
from pdserve_bench.compare.document import document, targets
from pdserve_bench.compare.noise import FIGURES
from pdserve_bench.compare.schedule import AGAIN
from pdserve_bench.load.ceiling import MIN_TIMES
from pdserve_bench.load.records import Outcome
from pdserve_bench.measures.breakdown import by_class
from pdserve_bench.measures.summarise import summary_to_json
from pdserve_bench.pages import plots, text
from pdserve_bench.pages.page import Page, Section, TableData, write_page
from pdserve_bench.pages.png import write_png
from pdserve_bench.report import targets_table, write_result
from pdserve_bench.study.explain import Answer, measured
from pdserve_bench.study.study import Study
from pdserve_bench.targets import Target

_LONG_PROMPT = 1024
_SHOWN = ("p99 ITL", "p99 TTFT", "goodput")


def write_study(study: Study, folder: Path) -> list[Path]:
    """result.json, runs.csv, report.html and two pictures. Raises OSError: one cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    found = study_document(study)
    write_result(folder / "result.json", found)
    write_runs_csv(folder / "runs.csv", study)
    write_page(folder / "report.html", study_page(study, found))
    written = [folder / name for name in ("result.json", "runs.csv", "report.html")]
    for name, figure in (("itl.png", _itl_cdf(study, study.result.rate_factors[-1])), ("ratios.png", _ratios(study))):
        if figure is not None:
            write_png(folder / name, figure)
            written.append(folder / name)
    return written


def study_targets(study: Study) -> list[Target]:
    """The comparison's, and that the load generator was far from its own limit."""
    fastest = max((one.summary.output_throughput for one in study.result.measured), default=0.0)
    found = targets(study.result, study.apart)
    if fastest > 0:
        name = "load generator against an instant server / fastest run, output rate"
        times = study.ceiling.tokens_per_s / fastest
        found.append(Target(name, "ratio", ">=", times, MIN_TIMES, study.result.foreign_cores))
    return found


def study_document(study: Study) -> dict[str, object]:
    options = study.options
    settings = {
        "load": options.load.name,
        "model_fingerprint": study.fingerprint,
        "duration_s": options.duration_s,
        "num_blocks": options.num_blocks,
        "num_checked": options.num_checked,
        "protocol": options.protocol,
        "cores": list(options.cores),
        "seed": options.seed,
        "pilot_s": options.pilot_s,
        "num_repeats": options.num_repeats,
        "chunks": list(options.chunks),
        "prefill_chunks": list(options.prefill_chunks),
        "serve_flags": list(options.serve_flags),
        "command": shlex.join(["pdserve", *sys.argv[1:]]),
    }
    pilot = [
        {"candidate": str(candidate), **asdict(candidate), "summary": summary_to_json(summary)}
        for candidate, summary in study.pilot.tried.items()
    ]
    compared = _portable(document(study.result, settings, study.apart))
    return {
        **compared,
        "targets": [target.to_json() for target in study_targets(study)],
        "client_ceiling": asdict(study.ceiling),
        "pilot": {"colocated": study.pilot.together.why, "apart": study.pilot.apart.why, "candidates": pilot},
        "answers": [_answer_json(one) for one in study.answers],
    }


def _portable(found: dict[str, object]) -> dict[str, object]:
    """Commands as anybody would type them: without where this interpreter and this home are."""
    words = json.dumps(found)
    for here, anywhere in ((f"{sys.executable} -m pdserve.cli", "pdserve"), (str(Path.home()), "~")):
        words = words.replace(here, anywhere)
    return cast(dict[str, object], json.loads(words))


def _answer_json(one: Answer) -> dict[str, object]:
    return {
        "rate_factor": one.rate_factor,
        "decision": one.conclusion.decision if one.conclusion else None,
        "text": one.conclusion.text if one.conclusion else "",
        "findings": [asdict(finding) for finding in one.findings],
        "limits": {name: asdict(limit) for name, limit in one.limits.items()},
        "time_shares": {name: dict(shares) for name, shares in one.shares.items()},
        "demand": demand_sentence(one.demand) if one.demand else None,
    }


def write_runs_csv(path: Path, study: Study) -> None:
    """A row for each run and class of requests; "all" for all of them."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        figures = ("offered", "completed", "failed", "rejected", "unfinished", "goodput", "output_throughput")
        latencies = [f"{name}_{point}_s" for name in ("ttft", "itl", "e2e") for point in ("p50", "p99")]
        writer.writerow(["rate_factor", "repeat", "fleet", "class", *figures, *latencies, "foreign_cores"])
        for one in study.result.measured:
            for name, summary in {"all": one.summary, **by_class(one.run, study.options.slo)}.items():
                points = [
                    distribution.percentiles.get(point)
                    for distribution in (summary.ttft, summary.itl, summary.e2e)
                    for point in (50.0, 99.0)
                ]
                counts = [getattr(summary, figure) for figure in figures]
                cell = one.cell
                writer.writerow(
                    [cell.rate_factor, cell.repeat, cell.label, name, *counts, *points, one.run.foreign_cores]
                )


def study_tables(study: Study) -> Iterator[Table]:
    """For a terminal, beside the comparison's: the demand, the targets."""
    yield from (demand_table(one.demand) for one in study.answers[-1:] if one.demand)
    yield targets_table(study_targets(study))


def headlines(study: Study) -> list[str]:
    """An answer for each rate."""
    return [
        f"At rate x{one.rate_factor:g}: {one.conclusion.headline if one.conclusion else 'nothing could be judged.'}"
        for one in study.answers
    ]


def study_page(study: Study, found: dict[str, object]) -> Page:
    conditions = cast(Mapping[str, object], found["conditions"])
    sections = (_overview(study), *(_rate_section(study, one) for one in study.answers), _pilot_section(study))
    title = f"Prefill and decode apart or together: {study.options.load.name}"
    return Page(title, tuple(headlines(study)), sections, conditions)


def _overview(study: Study) -> Section:
    choices = (study.pilot.together.why, study.pilot.apart.why)
    paragraphs = [f"Chosen: {why}." for why in choices]
    if study.result.interrupted:
        paragraphs.insert(0, "The study was interrupted: this is what was measured until then.")
    met = TableData(
        "Targets",
        ("figure", "value", "target", "met"),
        tuple(
            (one.name, f"{one.value:.3g} {one.unit}", f"{one.op} {one.target:g}", "yes" if one.met else "no")
            for one in study_targets(study)
        ),
    )
    goodputs = {label: _goodputs(study, label) for label in _labels(study)}
    return Section(
        "In short",
        tuple(paragraphs),
        (met, _judgements(study)),
        (
            (f"{study.apart} ÷ {study.result.baseline}, at the highest rate, and the noise", _ratios(study)),
            ("Goodput against the offered rate", plots.goodput_against_rate(goodputs)),
        ),
    )


def _rate_section(study: Study, one: Answer) -> Section:
    conclusion, rate = one.conclusion, one.rate_factor
    paragraphs = [*conclusion.figures, *conclusion.reasons] if conclusion else []
    if one.demand is not None:
        paragraphs.append(demand_sentence(one.demand))
    shares = {name: {phase.value: share for phase, share in found.items()} for name, found in one.shares.items()}
    lines = [
        (f"{label}: gaps between tokens, and when long prompts arrived", _itl_line(study, label, rate))
        for label in (study.apart, study.result.baseline)
    ]
    return Section(
        f"Rate x{rate:g}",
        tuple(paragraphs),
        (_runs_table(study, rate),),
        (
            ("Gaps between the tokens of completed requests", _itl_cdf(study, rate)),
            ("Time to first token", _ttft_cdf(study, rate)),
            *lines,
            ("Where the time of requests went, as a share", plots.phase_bars(shares) if any(shares.values()) else None),
        ),
    )


def _pilot_section(study: Study) -> Section:
    rows = tuple(
        (
            str(candidate),
            text.share(summary.goodput),
            text.seconds(summary.itl.median),
            text.seconds(summary.itl.p99),
            text.seconds(summary.ttft.p99),
        )
        for candidate, summary in study.pilot.tried.items()
    )
    columns = ("fleet", "goodput", "ITL p50", "ITL p99", "TTFT p99")
    return Section("Which fleets were compared", (), (TableData("Candidates", columns, rows),))


def _judgements(study: Study) -> TableData:
    rows = [
        (
            f"x{one.rate_factor:g}",
            one.fleet,
            one.figure.name,
            text.ratio(one.verdict.median) if one.verdict else text.NOTHING,
            one.verdict.word if one.verdict else text.NOTHING,
        )
        for one in study.result.judgements
    ]
    title = f"Against {study.result.baseline}; a difference inside the noise is none"
    return TableData(title, ("rate", "fleet", "figure", "ratio", "verdict"), tuple(rows))


def _runs_table(study: Study, rate: float) -> TableData:
    rows = tuple(
        (
            label,
            str(one.cell.repeat + 1),
            f"{one.summary.completed}/{one.summary.offered}",
            str(one.summary.failed + one.summary.rejected),
            str(one.summary.unfinished),
            text.share(one.summary.goodput),
            text.seconds(one.summary.ttft.median),
            text.seconds(one.summary.ttft.p99),
            text.seconds(one.summary.itl.median),
            text.seconds(one.summary.itl.p99),
            f"{one.run.foreign_cores:.2f}",
        )
        for label in _labels(study)
        for one in measured(study.result, rate, label)
    )
    columns = ("fleet", "repeat", "completed", "failed", "left over", "goodput", "TTFT p50", "p99", "ITL p50", "p99")
    return TableData("Runs", (*columns, "foreign cores"), rows)


def _labels(study: Study) -> list[str]:
    names = study.result.fleets
    return [names[0], names[0] + AGAIN, *names[1:]]


def _goodputs(study: Study, label: str) -> list[tuple[float, float, float, float]]:
    points: list[tuple[float, float, float, float]] = []
    for rate in study.result.rate_factors:
        runs = measured(study.result, rate, label)
        values = sorted(one.summary.goodput for one in runs)
        if values:
            points.append((_offered_rate(runs), median(values), values[0], values[-1]))
    return points


def _offered_rate(runs: Sequence[Measurement]) -> float:
    return sum(one.summary.offered for one in runs) / max(1e-9, sum(_span_s(one) for one in runs))


def _span_s(one: Measurement) -> float:
    return float(str(one.run.about.get("duration_s", one.run.duration_s)))


def _done(study: Study, rate: float, label: str) -> Iterator[tuple[float | None, list[float]]]:
    """(TTFT, ITLs) of completed requests of all repeats."""
    for one in measured(study.result, rate, label):
        for record in one.run.records:
            if record.outcome is Outcome.COMPLETED:
                yield record.ttft_s, record.itls_s


def _itl_cdf(study: Study, rate: float) -> Figure | None:
    gaps = {label: [gap for _, itls in _done(study, rate, label) for gap in itls] for label in _labels(study)}
    return plots.latency_cdf(f"ITL at rate x{rate:g}", "ms", gaps, study.options.slo.itl_s)


def _ttft_cdf(study: Study, rate: float) -> Figure | None:
    ttfts = {label: [ttft for ttft, _ in _done(study, rate, label) if ttft is not None] for label in _labels(study)}
    return plots.latency_cdf(f"TTFT at rate x{rate:g}", "s", ttfts, study.options.slo.ttft_s)


def _itl_line(study: Study, label: str, rate: float) -> Figure | None:
    runs = measured(study.result, rate, label)
    if not runs:
        return None
    longest = max(
        (gap for name in (study.apart, study.result.baseline) for _, itls in _done(study, rate, name) for gap in itls),
        default=0.1,
    )
    return plots.itl_over_time(
        runs[0].run, min_prompt_tokens=_LONG_PROMPT, slo_s=study.options.slo.itl_s, range_s=(0.0, longest)
    )


def _ratios(study: Study) -> Figure | None:
    rows: list[tuple[str, float | None, float, float]] = []
    for figure in FIGURES:
        noise = study.result.band(figure)
        if figure.name in _SHOWN and noise is not None and study.result.rate_factors:
            one = study.result.judgement(figure, study.apart, study.result.rate_factors[-1])
            rows.append((figure.name, one.verdict.median if one.verdict else None, noise.low, noise.high))
    return plots.ratio_chart(rows)
