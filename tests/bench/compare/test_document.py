"""A comparison's file, targets and tables, from measurements made up for the purpose."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from pdserve_bench.compare.comparison import ComparisonResult, Measurement
from pdserve_bench.compare.document import document, tables, targets
from pdserve_bench.compare.noise import FIGURES
from pdserve_bench.compare.schedule import Cell
from pdserve_bench.measures.summary import Slo, Summary
from pdserve_bench.report import write_result
from tests.bench.compare.runs import made_run
from tests.bench.compare.summaries import summary_with

APART, TOGETHER = "disaggregated", "colocated"
Runs = Mapping[tuple[float, int, str, bool], Summary]


def made(runs: Runs) -> ComparisonResult:
    measured = (Measurement(Cell(*cell), made_run(), summary) for cell, summary in runs.items())
    return ComparisonResult(
        baseline=TOGETHER,
        slo=Slo(),
        measured=tuple(measured),
        described={APART: {"pinning": {"decode-0": [1]}}, TOGETHER: {}},
        plans={1.0: [{"mix": "long prompts", "seed": 5}], 2.0: [{"mix": "long prompts", "seed": 6}]},
    )


def rounds(rate: float, apart: Summary, together: Summary, again: Summary, num_repeats: int = 1) -> Runs:
    return {
        (rate, repeat, *turn): summary
        for repeat in range(num_repeats)
        for turn, summary in (((APART, False), apart), ((TOGETHER, False), together), ((TOGETHER, True), again))
    }


USUAL = {
    **rounds(1.0, summary_with(1.0, 0.06), summary_with(0.9, 0.30), summary_with(0.9, 0.36)),
    **rounds(2.0, summary_with(0.8, 0.08), summary_with(0.4, 0.30), summary_with(0.4, 0.30)),
}


def test_targets_are_of_each_rates_itl_and_of_the_best_goodput() -> None:
    found = targets(made(USUAL), APART)
    assert [(one.name, one.target, one.met) for one in found] == [
        ("p99 ITL at rate x1, colocated / disaggregated", 4.0, True),
        ("p99 ITL at rate x2, colocated / disaggregated", 4.0, False),
        ("goodput, best rate x2, disaggregated / colocated", 1.5, True),
    ]
    assert [one.value for one in found] == [5.5, 3.75, 2.0]  # the control's two turns count alike


def test_a_peer_is_to_be_beaten_in_both() -> None:
    peer = {(1.0, 0, "peer", False): summary_with(0.5, 0.12), (2.0, 0, "peer", False): summary_with(0.9, None)}
    found = {one.name: (one.target, one.met) for one in targets(made({**USUAL, **peer}), APART) if "peer" in one.name}
    assert found == {
        "p99 ITL at rate x1, peer / disaggregated": (1.0, True),
        "goodput at rate x1, disaggregated / peer": (1.0, True),
        "goodput at rate x2, disaggregated / peer": (1.0, False),
    }


def test_a_baseline_that_serves_nobody_leaves_finite_figures() -> None:
    result = made(rounds(1.0, summary_with(0.5, 0.06), summary_with(0.0, None), summary_with(0.0, None)))
    (goodput,) = targets(result, APART)
    assert (goodput.value, goodput.met) == (50.0, True)
    by_figure = {one.figure.name: one for one in result.judgements}
    assert by_figure["goodput"].ratios == (math.inf,)
    assert by_figure["p99 ITL"].verdict is None
    shown = cast(dict[str, Any], document(result, {}, APART))
    judged = {one["figure"]: one for one in shown["judgements"]}
    assert (judged["goodput"]["median"], judged["goodput"]["verdict"]) == (None, "better")
    assert (judged["p99 ITL"]["median"], judged["p99 ITL"]["verdict"]) == (None, None)
    json.dumps(shown, allow_nan=False)


def test_one_band_holds_the_pairs_of_all_rates() -> None:
    result = made(USUAL)
    band = result.band(FIGURES[0])
    assert band is not None
    assert abs(band.high - 1.2) < 1e-9
    near = {**USUAL, (2.0, 0, APART, False): summary_with(0.4, 0.26)}
    verdict = made(near).judgement(FIGURES[0], APART, 2.0).verdict
    assert verdict is not None
    assert verdict.word == "none"


def test_rounds_without_one_of_both_are_left_out() -> None:
    runs = dict(rounds(1.0, summary_with(1.0, 0.06), summary_with(0.9, 0.30), summary_with(0.9, 0.30), 3))
    del runs[1.0, 1, TOGETHER, False], runs[1.0, 1, TOGETHER, True]
    del runs[1.0, 2, APART, False]
    judgement = made(runs).judgement(FIGURES[0], APART, 1.0)
    assert judgement.ratios == (0.2,)
    only_apart = made({(1.0, 0, APART, False): summary_with()})
    assert only_apart.judgement(FIGURES[0], APART, 1.0).verdict is None
    assert targets(only_apart, APART) == []


def test_the_file_holds_conditions_runs_noise_and_judgements(tmp_path: Path) -> None:
    shown = document(made(USUAL), {"model": "tiny"}, APART)
    write_result(tmp_path / "result.json", shown)
    read = json.loads((tmp_path / "result.json").read_text())
    assert read["benchmark"] == "compare"
    assert read["conditions"]["settings"]["model"] == "tiny"
    assert read["conditions"]["settings"]["slo"] == {"ttft_s": 6.0, "itl_s": 0.1}
    assert read["conditions"]["settings"]["fleets"]["disaggregated"]["pinning"] == {"decode-0": [1]}
    assert read["conditions"]["seeds"] == {"rate 1, repeat 0": 5, "rate 2, repeat 0": 6}
    assert [(run["rate_factor"], run["label"]) for run in read["runs"]] == [
        (rate, label) for rate in (1.0, 2.0) for label in ("colocated", "colocated (again)", "disaggregated")
    ]
    assert read["runs"][0]["summary"]["itl"]["p99"] == 0.3
    assert {one["figure"] for one in read["noise"]} == {figure.name for figure in FIGURES}
    assert len(read["judgements"]) == 2 * len(FIGURES)
    assert len(read["targets"]) == 3


def test_tables_show_pinning_runs_and_verdicts() -> None:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(*tables(made(USUAL)))
    text = capture.get()
    for part in ("decode-0", "Rate x2", "colocated (again)", "better", "none", "0.83–1.20", "Against colocated"):
        assert part in text
    assert not any(word in text for word in ("nan", "inf "))
