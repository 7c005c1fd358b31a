"""Figures as tables for people, in milliseconds. No latency without the counts of what failed beside it."""

from collections.abc import Collection, Mapping

from rich.markup import escape
from rich.table import Table

from pdserve_bench.measures.summary import Distribution, Summary
from pdserve_bench.report import new_table

_RUN_COLUMNS = (
    "done/\noffered",
    "fail",
    "rej",
    "unfin",
    "good",
    "TTFT\np50",
    "\np99",
    "ITL\np50",
    "\np99",
    "TPOT\np50",
    "E2E\np50",
    "out\ntok/s",
)
_OUTCOME_COLUMNS = (
    "offered",
    "completed",
    "failed",
    "rejected",
    "cancelled",
    "unfinished",
    "good",
    "wrong",
    "miscounted",
    "ITLs",
)


def run_table(summaries: Mapping[str, Summary], *, itl_per_event: Collection[str] = ()) -> Table:
    """A row for each run. `itl_per_event`: those whose ITLs lie between events, not tokens; they are marked."""
    return _latency_table("Runs", "run", summaries, itl_per_event)


def breakdown_table(by: str, groups: Mapping[str, Summary]) -> Table:
    """A row for each part of one run; `by`: what it was parted by, such as "class"."""
    return _latency_table(f"By {by}", by, groups, ())


def outcome_table(summaries: Mapping[str, Summary]) -> Table:
    """How requests ended, and how many samples stand behind the latencies of tokens."""
    table = _fixed(new_table("Requests, by how they ended", ("run",), _OUTCOME_COLUMNS))
    for name, summary in summaries.items():
        table.add_row(escape(name) or _NOTHING, *(str(count) for count in _outcomes(summary)))
    return table


def milliseconds(value_s: float | None) -> str:
    """One decimal below 100 ms, none above; a dash where there is no figure."""
    if value_s is None:
        return _NOTHING
    return f"{value_s * 1000:.1f}" if value_s < 0.1 else f"{value_s * 1000:.0f}"


def _latency_table(title: str, first: str, summaries: Mapping[str, Summary], per_event: Collection[str]) -> Table:
    with_cancelled = any(summary.cancelled for summary in summaries.values())
    columns = [*_RUN_COLUMNS[:4], *(["canc"] if with_cancelled else []), *_RUN_COLUMNS[4:]]
    table = _fixed(new_table(f"{title} (ms, of completed requests)", (first,), columns))
    for name, summary in summaries.items():
        cancelled = [str(summary.cancelled)] if with_cancelled else []
        marked = f"{escape(name) or _NOTHING}{_PER_EVENT if name in per_event else ''}"
        table.add_row(marked, *_counts(summary), *cancelled, *_figures(summary))
    if set(per_event) & set(summaries):
        table.caption = f"{_PER_EVENT.strip()} ITL between events, which may carry several tokens"
        table.caption_justify = "left"
    return table


def _fixed(table: Table) -> Table:
    """Only the name may wrap: a number broken in two misleads. Usual figures so fit into 80 columns."""
    table.pad_edge, table.collapse_padding = False, True
    table.columns[0].min_width = _NAME_WIDTH
    for column in table.columns[1:]:
        column.no_wrap = True
    return table


def _counts(summary: Summary) -> list[str]:
    done = f"{summary.completed}/{summary.offered}"
    return [done, str(summary.failed), str(summary.rejected), str(summary.unfinished)]


def _figures(summary: Summary) -> list[str]:
    return [
        f"{summary.goodput:.0%}" if summary.offered else _NOTHING,
        *_median_and_p99(summary.ttft),
        *_median_and_p99(summary.itl),
        milliseconds(summary.tpot.median),
        milliseconds(summary.e2e.median),
        f"{summary.output_throughput:.1f}",
    ]


def _median_and_p99(distribution: Distribution) -> tuple[str, str]:
    return milliseconds(distribution.median), milliseconds(distribution.p99)


def _outcomes(summary: Summary) -> list[int]:
    return [
        summary.offered,
        summary.completed,
        summary.failed,
        summary.rejected,
        summary.cancelled,
        summary.unfinished,
        summary.num_good,
        summary.num_wrong,
        summary.num_count_mismatches,
        summary.itl.count,
    ]


_NAME_WIDTH = 8
_NOTHING = "–"
_PER_EVENT = " *"
