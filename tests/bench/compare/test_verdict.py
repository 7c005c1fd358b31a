"""The answer follows from the judged figures, and says which, by how much and why."""

import itertools
import math
from typing import Literal

import pytest

from pdserve_bench.compare.attribution import Finding
from pdserve_bench.compare.limiting import Limit, Resource
from pdserve_bench.compare.phase_changes import Quantity
from pdserve_bench.compare.phases import Phase
from pdserve_bench.compare.verdict import (
    Conclusion,
    Decision,
    Explanation,
    FigureJudgement,
    JudgedFigure,
    Setting,
    conclude,
    decide,
)
from pdserve_bench.measures.summary import Slo

Word = Literal["better", "worse", "none"]
SETTING = Setting(1, 1, 256, "one engine of 2 threads, chunk 128", Slo())
ITL = FigureJudgement(JudgedFigure.ITL_P99, "better", 0.24, 0.06, 0.285, 0.067)
TTFT = FigureJudgement(JudgedFigure.TTFT_P99, "worse", 1.33, 0.05, 2.7, 3.6)
GOODPUT = FigureJudgement(JudgedFigure.GOODPUT, "better", 1.6, 0.04, 0.5, 0.8)
SLOW_PREFILL = Finding(Phase.PREFILL, Quantity.PREFILL_TOKEN, "", 0.9, 2.0, "Prefill took twice as long a token.")
FOLLOWED = Finding(Phase.QUEUE, Quantity.QUEUE, "", 2.0, 3.0, "The queue grew.", follows_from=Phase.PREFILL)
FAST_DECODE = Finding(Phase.DECODE, Quantity.DECODE_TOKEN, "", -0.2, 0.3, "A decode step took a third.")


def judged(figure: JudgedFigure, verdict: Word) -> FigureJudgement:
    return FigureJudgement(figure, verdict, {"better": 0.5, "worse": 2.0, "none": 1.0}[verdict], 0.05)


def none_of_all() -> Conclusion:
    return conclude([judged(figure, "none") for figure in JudgedFigure], SETTING)


def test_yes() -> None:
    verdict = conclude([ITL, GOODPUT], SETTING)
    assert verdict.decision is Decision.DISAGGREGATE
    assert verdict.headline.startswith("Yes")
    for claim in (
        "1 prefill : 1 decode",
        "chunk 256",
        "one engine of 2 threads",
        "6 s",
        "100 ms",
        "p99 ITL",
        "goodput",
    ):
        assert claim in verdict.headline
    for claim in ("4.17 times lower", "67 ms", "285 ms", "±6%", "1.60 times higher", "80%", "50%"):
        assert claim in verdict.text


def test_yes_at_a_price() -> None:
    verdict = conclude([ITL, GOODPUT, TTFT], SETTING)
    assert verdict.decision is Decision.DISAGGREGATE
    assert "price" in verdict.headline
    assert "p99 TTFT" in verdict.headline


def test_no_with_the_cause() -> None:
    why = Explanation(
        [FAST_DECODE, FOLLOWED, SLOW_PREFILL], None, Limit(Resource.PREFILL_POOL, "Prefill was the limit.")
    )
    verdict = conclude([TTFT, judged(JudgedFigure.ITL_P99, "none")], SETTING, why)
    assert verdict.decision is Decision.COLOCATE
    assert verdict.headline.startswith("No")
    assert "colocated is better" in verdict.headline
    assert "p99 TTFT" in verdict.headline
    assert [SLOW_PREFILL.sentence in reason for reason in verdict.reasons] == [True, False]
    assert "Prefill was the limit." in verdict.reasons[-1]
    assert "1.33 times higher" in verdict.text
    assert FOLLOWED.sentence not in verdict.text
    assert FAST_DECODE.sentence not in verdict.text


def test_no_difference() -> None:
    verdict = none_of_all()
    assert verdict.decision is Decision.NO_DIFFERENCE
    assert "beyond the noise" in verdict.headline
    assert "better" not in verdict.text
    assert "worse" not in verdict.text


def test_it_depends() -> None:
    verdict = conclude([ITL, TTFT, judged(JudgedFigure.GOODPUT, "none")], SETTING)
    assert verdict.decision is Decision.DEPENDS
    assert "p99 ITL is better" in verdict.headline
    assert "p99 TTFT is worse" in verdict.headline
    assert "goodput" in verdict.headline
    assert "goodput" not in conclude([ITL, TTFT], SETTING).text


def test_goodput_decides_and_else_the_others_must_agree() -> None:
    words: tuple[Word, ...] = ("better", "worse", "none")
    for goodput, itl, ttft in itertools.product(words, repeat=3):
        figures = (JudgedFigure.GOODPUT, JudgedFigure.ITL_P99, JudgedFigure.TTFT_P99)
        judgements = [judged(*pair) for pair in zip(figures, (goodput, itl, ttft), strict=True)]
        found = decide(judgements)
        if goodput != "none":
            assert found is (Decision.DISAGGREGATE if goodput == "better" else Decision.COLOCATE)
        elif {itl, ttft} == {"better", "worse"}:
            assert found is Decision.DEPENDS
        elif "better" in (itl, ttft):
            assert found is Decision.DISAGGREGATE
        elif "worse" in (itl, ttft):
            assert found is Decision.COLOCATE
        else:
            assert found is Decision.NO_DIFFERENCE
        assert conclude(judgements, SETTING).decision is found


def test_a_ratio_to_or_from_nothing_and_a_band_without_bound_are_put_in_words() -> None:
    from_nothing = FigureJudgement(JudgedFigure.GOODPUT, "better", math.inf, 0.05, 0.0, 0.4)
    to_nothing = FigureJudgement(JudgedFigure.THROUGHPUT, "worse", 0.0, math.inf, 9.0, 0.0)
    text = conclude([from_nothing, to_nothing], SETTING).text
    assert "inf" not in text
    assert "Goodput is higher" in text
    assert "Output throughput is lower" in text


def test_nothing_judged_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        conclude([], SETTING)
