"""The noise band and what it lets us say: no difference inside it counts, in either direction."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_bench.compare.noise import FLOOR, Band, band, judge, ratio_of, ratios_of

RATIOS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=9)


def test_the_farthest_pair_sets_the_band_both_ways() -> None:
    found = band([1.02, 0.8, 1.1])
    assert (found.low, found.high) == pytest.approx((0.8, 1.25))


def test_pairs_that_happen_to_agree_leave_the_floor() -> None:
    found = band([1.0, 1.001])
    assert (found.low, found.high) == pytest.approx((1 / (1 + FLOOR), 1 + FLOOR))


def test_without_pairs_there_is_no_band() -> None:
    with pytest.raises(ValueError, match="noise is unknown"):
        band([])
    with pytest.raises(ValueError, match="no round"):
        judge([], Band(0.9, 1.1))


@given(RATIOS)
def test_no_control_pair_is_ever_called_a_difference(ratios: list[float]) -> None:
    noise = band(ratios)
    assert noise.low < 1 < noise.high
    for ratio in ratios:
        assert noise.low * (1 - 1e-9) <= ratio <= noise.high * (1 + 1e-9)
        assert noise.low * (1 - 1e-9) <= 1 / ratio <= noise.high * (1 + 1e-9)
    wider = Band(noise.low * (1 - 1e-9), noise.high * (1 + 1e-9))
    assert judge(ratios, wider).word == "none"


@given(RATIOS, RATIOS)
def test_whom_one_calls_better_the_other_calls_worse(ratios: list[float], control: list[float]) -> None:
    noise = band(control)
    here, there = judge(ratios, noise), judge(ratios, noise, lower_is_better=True)
    opposite = {"better": "worse", "worse": "better", "none": "none"}
    assert there.word == opposite[here.word]
    assert here.median == there.median


@pytest.mark.parametrize(
    ("ratios", "lower_is_better", "word"),
    [
        ([1.5, 1.6, 0.9], False, "better"),
        ([1.5, 1.6, 0.9], True, "worse"),
        ([0.2, 0.3], True, "better"),
        ([0.2, 0.3], False, "worse"),
        ([1.09, 5.0, 0.9], False, "none"),
        ([math.inf, math.inf], False, "better"),
        ([0.0], False, "worse"),
    ],
)
def test_the_median_is_judged_by_direction(ratios: list[float], lower_is_better: bool, word: str) -> None:
    assert judge(ratios, Band(0.9, 1.1), lower_is_better=lower_is_better).word == word


def test_one_control_pair_of_nothing_against_something_leaves_nothing_to_say() -> None:
    noise = band([ratio_of(0.0, 0.4)])
    assert (noise.low, noise.high) == (0.0, math.inf)
    assert judge([math.inf], noise).word == "none"


def test_ratios_of_figures_that_may_be_missing_or_nothing() -> None:
    pairs = [(2.0, 1.0), (None, 1.0), (1.0, None), (0.0, 0.0), (1.0, 0.0), (0.0, 1.0)]
    assert ratios_of(pairs) == [2.0, 1.0, math.inf, 0.0]
