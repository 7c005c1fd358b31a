"""Tables as a terminal of 100 columns shows them."""

import pytest
from rich.console import Console
from rich.table import Table

from pdserve_bench.load.records import Outcome, RequestRecord
from pdserve_bench.measures.breakdown import by_class
from pdserve_bench.measures.summarise import summarise
from pdserve_bench.measures.summary import Slo, Summary
from pdserve_bench.measures.tables import breakdown_table, milliseconds, outcome_table, run_table
from tests.bench.measures.making import record, run_of

SLO = Slo()


def _lines(table: Table, width: int) -> list[str]:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def _shown(table: Table) -> list[str]:
    lines = _lines(table, 100)
    assert all(len(line) <= 100 and "…" not in line for line in lines)
    return lines


def _summary(*extra: RequestRecord) -> Summary:
    return summarise(run_of([record(0, events=[(0.5, 1), (0.5625, 1), (2.5, 1)]), *extra]), SLO)


def test_failures_stand_in_the_row_of_every_latency() -> None:
    failed = [record(number, Outcome.FAILED) for number in range(1, 3)]
    refused = [record(number, Outcome.REJECTED) for number in range(3, 6)]
    left_over = [record(number, Outcome.UNFINISHED) for number in range(6, 10)]
    lines = _shown(run_table({"apart": _summary(*failed, *refused, *left_over)}))
    assert lines[-1].split() == [
        "apart", "1/10", "2", "3", "4", "0%", "500", "500", "1000", "1919", "1000", "2500", "0.3"
    ]  # fmt: skip


def test_wide_figures_and_a_long_name_fit() -> None:
    slow = [record(number, events=[(123.4, 1), (356.7, 1)]) for number in range(1234)]
    cancelled = [record(number, Outcome.CANCELLED) for number in range(12)]
    summary = summarise(run_of([*slow, *cancelled], 400.0), SLO)
    name = "disaggregated 1P:1D, chunk 256, 2.5 requests/s"
    text = "\n".join(_shown(run_table({name: summary})))
    for figure in ("1234/1246", "12", "123400", "233300", "356700"):
        assert figure in text.split()


def test_in_eighty_columns_the_name_gives_way_to_usual_figures() -> None:
    stream = [(20.5, 1), (21.75, 1), (47.875, 1)]
    many = summarise(run_of([record(number, events=stream) for number in range(1234)], 100.0), SLO)
    lines = _lines(run_table({"disaggregated 1P:1D, chunk 256": many, "b": many}), 80)
    figures = ["1234/1234", "0", "0", "0", "0%", "20500", "20500", "13688", "26125", "13688", "47875", "37.0"]
    rows = [line.split() for line in lines if "1234" in line]
    assert [row[-len(figures) :] for row in rows] == [figures, figures]


def test_the_column_of_cancellations_shows_only_where_there_were_some() -> None:
    assert "canc" not in " ".join(_shown(run_table({"a": _summary()})))
    lines = _shown(run_table({"a": _summary(), "b": _summary(record(1, Outcome.CANCELLED))}))
    assert "canc" in " ".join(lines)
    assert [line.split()[1:6] for line in lines[-2:]] == [["1/1", "0", "0", "0", "0"], ["1/2", "0", "0", "0", "1"]]


def test_what_has_no_figure_shows_a_dash() -> None:
    lines = _shown(run_table({"none": summarise(run_of([]), SLO)}))
    assert lines[-1].split() == ["none", "0/0", "0", "0", "0", *["–"] * 7, "0.0"]


def test_a_name_in_brackets_is_no_markup() -> None:
    assert _shown(run_table({"[red]": _summary()}))[-1].split()[0] == "[red]"
    assert _shown(outcome_table({"[/x]": _summary()}))[-1].split()[0] == "[/x]"


def test_itls_between_events_are_marked() -> None:
    text = "\n".join(_shown(run_table({"peer": _summary(), "ours": _summary()}, itl_per_event=["peer"])))
    assert "peer *" in text
    assert "ours *" not in text
    assert "* ITL between events" in text
    assert "ITL between events" not in "\n".join(_shown(run_table({"ours": _summary()})))


def test_a_breakdown_is_named_after_what_parts_it() -> None:
    run = run_of([record(0, events=[(0.5, 1)]), record(1, Outcome.FAILED, request_class="rag")])
    lines = _shown(breakdown_table("class", by_class(run, SLO)))
    assert lines[0].startswith("By class")
    assert [line.split()[:3] for line in lines[-2:]] == [["chat", "1/1", "0"], ["rag", "0/1", "1"]]


def test_outcomes_and_miscounts() -> None:
    miscounted = record(1, events=[(0.5, 2)], num_output_tokens=3)
    lines = _shown(outcome_table({"apart": _summary(miscounted, record(2, Outcome.REJECTED))}))
    assert lines[-1].split() == ["apart", "3", "2", "0", "1", "0", "0", "1", "0", "1", "3"]


@pytest.mark.parametrize(
    ("value_s", "shown"),
    [(None, "–"), (0.0, "0.0"), (0.04567, "45.7"), (0.1, "100"), (2.5, "2500"), (123.4, "123400")],
)
def test_milliseconds(value_s: float | None, shown: str) -> None:
    assert milliseconds(value_s) == shown
