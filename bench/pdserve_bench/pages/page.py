"""A report as one HTML file that loads nothing from anywhere. Knows tables and figures, and the section of one run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from pdserve_bench.load.records import Outcome, RunResult
from pdserve_bench.measures.summary import Distribution, Slo, Summary
from pdserve_bench.pages import plots, text
from pdserve_bench.pages.svg import inline_svg


@dataclass(frozen=True, slots=True)
class TableData:
    """Cells as they are shown.

    Raises:
        ValueError: a row has not as many cells as there are columns.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: {len(row)} cells in a row of {len(self.columns)} columns: {row}")


@dataclass(frozen=True, slots=True)
class Section:
    """`text`: plain paragraphs. `figures`: caption and plot, or None, which shows as a sentence that there is none."""

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[TableData, ...] = ()
    figures: tuple[tuple[str, Figure | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """`summary`: the verdict, before all else. `conditions`: anything that JSON can hold."""

    title: str
    summary: tuple[str, ...]
    sections: tuple[Section, ...]
    conditions: Mapping[str, object]


def render(page: Page) -> str:
    """HTML, equal for equal pages."""
    template = _environment().get_template("page.html.jinja")
    return template.render(page=page, conditions=list(_flat(page.conditions)), svg=_svg)


def write_page(path: Path, page: Page) -> None:
    """Raises OSError if the file cannot be written."""
    path.write_text(render(page), encoding="utf-8")


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("pdserve_bench", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _svg(figure: Figure, caption: str, prefix: str) -> Markup:
    return Markup(inline_svg(figure, text.plain(caption), prefix))


def _visible(value: object) -> object:
    """Of what a template shows; Markup is what we made ourselves."""
    return text.plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _flat(values: Mapping[str, object], path: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of nested mappings, by their dotted path."""
    for name, value in values.items():
        if not isinstance(value, Mapping):
            yield f"{path}{name}", _leaf(value)
        elif value:
            yield from _flat(cast(Mapping[str, object], value), f"{path}{name}.")
        else:
            yield f"{path}{name}", text.NOTHING


def _leaf(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_leaf(part) for part in cast(Sequence[object], value)) or text.NOTHING
    return text.NOTHING if value is None else str(value)


def run_section(name: str, run: RunResult, summary: Summary, slo: Slo | None = None) -> Section:
    """Of one run: what became of its requests, their latencies, and what the load generator itself took and missed."""
    accepted = slo or Slo()
    done = [record for record in run.records if record.outcome is Outcome.COMPLETED]
    ttfts_s = [record.ttft_s for record in done if record.ttft_s is not None]
    itls_s = [gap_s for record in done for gap_s in record.itls_s]
    return Section(
        title=name,
        text=tuple(_remarks(run, summary, accepted)),
        tables=(_counts(summary), _latencies(summary), _throughput(summary), _client_limits(run)),
        figures=(
            (
                f"{name}: time to first token from the scheduled time, of completed requests",
                plots.latency_cdf("TTFT", "s", {name: ttfts_s}, accepted.ttft_s),
            ),
            (
                f"{name}: gaps between the tokens of completed requests",
                plots.latency_cdf("ITL", "ms", {name: itls_s}, accepted.itl_s),
            ),
            (
                f"{name}: gaps between tokens in the course of the run",
                plots.itl_over_time(run, slo_s=accepted.itl_s),
            ),
        ),
    )


def _remarks(run: RunResult, summary: Summary, slo: Slo) -> Iterator[str]:
    yield (
        f"{text.count(summary.num_good)} of {text.count(summary.offered)} offered requests "
        f"({text.share(summary.goodput)}) were good: completed, first token within {text.objective_s(slo.ttft_s)}, "
        f"p99 of the request’s own ITLs within {text.objective_s(slo.itl_s)}. "
        f"The run took {text.seconds(run.duration_s)}."
    )
    if run.interrupted:
        yield "It was interrupted: these are the requests of its first part."
    if summary.num_wrong:
        yield f"Outputs found wrong, which do not count as good: {text.count(summary.num_wrong)}."
    if summary.num_count_mismatches:
        yield f"Answers whose usage differs from the tokens counted: {text.count(summary.num_count_mismatches)}."


def _counts(summary: Summary) -> TableData:
    counts = {
        "offered": summary.offered,
        "completed": summary.completed,
        "failed": summary.failed,
        "rejected": summary.rejected,
        "cancelled as planned": summary.cancelled,
        "unfinished": summary.unfinished,
    }
    shares = {what: number / summary.offered if summary.offered else None for what, number in counts.items()}
    rows = tuple((what, text.count(number), text.share(shares[what])) for what, number in counts.items())
    return TableData("Requests", ("requests", "count", "of offered"), rows)


def _latencies(summary: Summary) -> TableData:
    rows = {
        "TTFT": summary.ttft,
        "TTFT from send": summary.ttft_from_send,
        "ITL": summary.itl,
        "TPOT": summary.tpot,
        "E2E": summary.e2e,
    }
    return TableData(
        "Latencies of completed requests",
        ("latency", "count", "mean", "p50", "p90", "p99", "max"),
        tuple((what, text.count(found.count), *_figures(found)) for what, found in rows.items()),
    )


def _figures(found: Distribution) -> tuple[str, ...]:
    percentiles = [found.percentiles.get(percent) for percent in (50.0, 90.0, 99.0)]
    return tuple(text.seconds(value) for value in (found.mean, *percentiles, found.max))


def _throughput(summary: Summary) -> TableData:
    rows = (
        ("requests", text.per_second(summary.request_throughput, "req")),
        ("prompt tokens", text.per_second(summary.prompt_throughput, "tok")),
        ("output tokens", text.per_second(summary.output_throughput, "tok")),
        ("prompt tokens from a cache", text.share(summary.cached_share)),
    )
    return TableData("Throughput", ("what", "figure"), rows)


def _client_limits(run: RunResult) -> TableData:
    limits = run.limits
    rows = (
        ("event loop late, p99", text.seconds(limits.loop_lag_p99_s)),
        ("event loop late, max", text.seconds(limits.loop_lag_max_s)),
        ("sent late, p99", text.seconds(limits.dispatch_lag_p99_s)),
        ("cores used by the client", f"{limits.cores:.2f}"),
        ("cores used by others", f"{run.foreign_cores:.2f}"),
        ("most requests in flight", text.count(limits.peak_in_flight)),
    )
    return TableData("The load generator’s own limits", ("what", "figure"), rows)
