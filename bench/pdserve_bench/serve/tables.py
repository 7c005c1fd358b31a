"""A run, a search or a sweep as tables and lines for a terminal."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from pdserve_bench.load.records import ClientLimits
from pdserve_bench.measures.summarise import num_itl_per_event
from pdserve_bench.measures.tables import breakdown_table, milliseconds, outcome_table, run_table
from pdserve_bench.report import new_table, noise_mark
from pdserve_bench.serve.capacity import Capacity
from pdserve_bench.serve.run import Served
from pdserve_bench.serve.search import Found

_NOTHING = "–"


def served_tables(served: Served) -> Iterator[Table]:
    summaries = {served.run.name: served.summary}
    per_event = summaries if num_itl_per_event(served.run.records) else ()
    yield run_table(summaries, itl_per_event=tuple(per_event))
    if len(served.classes) > 1:
        yield breakdown_table("class", served.classes)
    yield outcome_table(summaries)


def served_lines(served: Served) -> Iterator[str]:
    """Throughput, the prefix cache, and what the client itself took."""
    summary = served.summary
    yield (
        f"throughput: {summary.request_throughput:.3g} requests/s, {summary.prompt_throughput:.1f} prompt and "
        f"{summary.output_throughput:.1f} output tokens/s over {summary.duration_s:.1f} s"
    )
    yield f"prefix cache: hit rate {served.cache}"
    if served.num_checked:
        yield f"outputs checked: {served.num_checked}, of which {summary.num_wrong} wrong"
    yield f"client: {_limits(served.run.limits)}"


def _limits(limits: ClientLimits) -> str:
    return (
        f"event loop late p99 {milliseconds(limits.loop_lag_p99_s)} ms, max {milliseconds(limits.loop_lag_max_s)} ms; "
        f"sent late p99 {milliseconds(limits.dispatch_lag_p99_s)} ms; {limits.cores:.2f} cores; "
        f"at most {limits.peak_in_flight} in flight"
    )


def search_table(found: Found, runs: Sequence[Served]) -> Table:
    """`runs`: one for each trial."""
    table = new_table("Search", ("run",), ("requests/s", "goodput", "done/offered", "passed", "client"))
    for trial, served in zip(found.trials, runs, strict=True):
        passed = "yes" if trial.passed else "no"
        done = f"{served.summary.completed}/{served.summary.offered}"
        client = "late" if served.limits_told else "in time"
        table.add_row(str(trial.repeat + 1), f"{trial.rate:.4g}", f"{trial.goodput:.1%}", done, passed, client)
    return table


def capacity_table(capacity: Capacity) -> Table:
    """Latencies of interactive requests in ms; "docs": always in flight; "KV": the highest share of blocks in use."""
    numbers = ("docs", "done/\noffered", "docs\ndone", "fail", "exp", "TTFT\np50", "\np99", "ITL\np50", "\np99")
    more = ("in\ntok/s", "out\ntok/s", "cached", "KV", "alloc\nfail")
    table = new_table("Capacity", ("requests/s",), (*numbers, *more, "missed"))
    for column in table.columns[:-1]:
        column.no_wrap = True
    for cell in capacity.cells:
        missed = capacity.objectives.missed(cell)
        table.add_row(
            f"{cell.rate:g}{noise_mark(cell.foreign_cores)}",
            str(cell.num_documents),
            f"{cell.completed}/{cell.offered}",
            str(cell.documents_completed),
            str(cell.num_failures),
            str(cell.num_expired),
            *(milliseconds(value) for value in (cell.ttft_p50_s, cell.ttft_p99_s, cell.itl_p50_s, cell.itl_p99_s)),
            f"{cell.prompt_tokens_per_s:.0f}",
            f"{cell.output_tokens_per_s:.1f}",
            _share(cell.cached_share),
            _share(cell.peak_block_occupancy),
            _NOTHING if cell.num_allocation_failures is None else f"{cell.num_allocation_failures:g}",
            "; ".join(missed) or _NOTHING,
            style="red" if missed else "",
        )
    return table


def _share(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.0%}"
