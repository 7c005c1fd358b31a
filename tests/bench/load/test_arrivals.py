import math
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_bench.load.arrivals import Arrivals, arrival_times, first_arrivals

RATES = st.floats(0.05, 20)
ARRIVALS = st.one_of(
    st.builds(Arrivals, st.sampled_from(["poisson", "constant"]), RATES),
    st.builds(Arrivals, st.just("gamma"), RATES, st.floats(0.05, 8)),
    st.builds(lambda rate, end: Arrivals("ramp", rate, end_rate=end), RATES, RATES),
)
SEEDS = st.integers(0, 2**64)


@settings(deadline=None)
@given(ARRIVALS, st.floats(0.1, 60), SEEDS)
def test_times_rise_within_the_duration_and_come_again_from_the_same_seed(
    arrivals: Arrivals, duration_s: float, seed: int
) -> None:
    times = arrival_times(arrivals, duration_s, seed)
    assert times == sorted(times)
    assert all(0 <= time_s < duration_s for time_s in times)
    assert times == arrival_times(arrivals, duration_s, seed)


@settings(deadline=None)
@given(ARRIVALS, st.integers(0, 50), SEEDS)
def test_first_arrivals_are_as_many_as_asked_for(arrivals: Arrivals, count: int, seed: int) -> None:
    times = first_arrivals(arrivals, count, seed)
    assert len(times) == count
    assert times == sorted(times)
    assert all(0 <= time_s < math.inf for time_s in times)


@settings(deadline=None)
@given(ARRIVALS, st.sampled_from([0.25, 0.5, 2.0, 4.0]), SEEDS)
def test_a_rate_factor_keeps_the_pattern(arrivals: Arrivals, factor: float, seed: int) -> None:
    plain = arrival_times(arrivals, 20, seed)
    faster = arrival_times(arrivals.scaled(factor), 20 / factor, seed)
    assert faster == pytest.approx([time_s / factor for time_s in plain])


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_set_mean_and_variation(burstiness: float) -> None:
    times = arrival_times(Arrivals("gamma", 5, burstiness), 4000, seed=3)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert len(times) / 4000 == pytest.approx(5, rel=0.06)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1 / math.sqrt(burstiness), rel=0.06)


def test_poisson_counts_vary_as_much_as_their_mean() -> None:
    counts = [len(arrival_times(Arrivals("poisson", 2), 10, seed)) for seed in range(1500)]
    assert fmean(counts) == pytest.approx(20, rel=0.03)
    assert pstdev(counts) ** 2 == pytest.approx(20, rel=0.15)


def test_poisson_is_gamma_of_burstiness_one() -> None:
    assert arrival_times(Arrivals("poisson", 2), 50, 7) == arrival_times(Arrivals("gamma", 2, 1.0), 50, 7)


def test_bursty_arrivals_are_under_way_at_the_start() -> None:
    """Their first gap would otherwise begin at time 0, and 10 s would hold 11.5 arrivals on average."""
    counts = [len(arrival_times(Arrivals("gamma", 1, 0.25), 10, seed)) for seed in range(4000)]
    assert fmean(counts) == pytest.approx(10, rel=0.05)


def test_constant_arrivals_begin_at_once() -> None:
    assert arrival_times(Arrivals("constant", 0.5), 6, 1) == [0.0, 2.0, 4.0]
    assert first_arrivals(Arrivals("constant", 4), 3, 1) == [0.0, 0.25, 0.5]


def test_rounding_lets_no_arrival_fall_on_the_end() -> None:
    rate, duration_s = 0.59, 3 / 0.59
    assert rate * duration_s > 3
    assert len(arrival_times(Arrivals("constant", rate), duration_s, 1)) == 3


@pytest.mark.parametrize(("rate", "end_rate"), [(0, 10), (10, 0), (4, 6), (5, 5)])
def test_a_ramp_is_linear(rate: float, end_rate: float) -> None:
    arrivals = Arrivals("ramp", rate, end_rate=end_rate)
    times = arrival_times(arrivals, 2000, seed=5)
    for begin_s in (0, 500, 1000, 1500):
        expected = 500 * (rate + (end_rate - rate) * (begin_s + 250) / 2000)
        counted = sum(begin_s <= time_s < begin_s + 500 for time_s in times)
        assert abs(counted - expected) < 4 * math.sqrt(expected)


def test_a_ramp_of_a_set_number_lasts_as_long_as_that_number_takes() -> None:
    times = first_arrivals(Arrivals("ramp", 0, end_rate=10), 5000, seed=5)
    assert max(times) < 1000
    assert sum(time_s < 500 for time_s in times) == pytest.approx(1250, rel=0.1)


def test_an_endless_rate_sends_all_at_once() -> None:
    everything = Arrivals("poisson", math.inf)
    assert first_arrivals(everything, 3, 1) == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="a number of requests"):
        arrival_times(everything, 10, 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "weekly", "rate": 1}, "weekly"),
        ({"kind": "poisson", "rate": 0}, "above 0, not 0"),
        ({"kind": "poisson", "rate": math.nan}, "nan"),
        ({"kind": "gamma", "rate": 1, "burstiness": 0}, "burstiness"),
        ({"kind": "gamma", "rate": 1, "burstiness": math.inf}, "burstiness"),
        ({"kind": "poisson", "rate": 1, "burstiness": 0.5}, "needs gamma"),
        ({"kind": "ramp", "rate": 1}, "end rate"),
        ({"kind": "constant", "rate": 1, "end_rate": 2}, "end rate"),
        ({"kind": "ramp", "rate": 0, "end_rate": 0}, "not both 0"),
        ({"kind": "ramp", "rate": -1, "end_rate": 2}, "-1 to 2"),
        ({"kind": "ramp", "rate": 1, "end_rate": math.inf}, "finite"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arrivals(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("duration_s", [0, -1, math.inf, math.nan])
def test_a_duration_must_be_a_time(duration_s: float) -> None:
    with pytest.raises(ValueError, match="duration"):
        arrival_times(Arrivals("poisson", 1), duration_s, 1)


def test_factors_and_counts_are_checked() -> None:
    with pytest.raises(ValueError, match="rate factor"):
        Arrivals("poisson", 1).scaled(0)
    with pytest.raises(ValueError, match="-1"):
        first_arrivals(Arrivals("poisson", 1), -1, 1)


def test_mean_rates() -> None:
    assert Arrivals("gamma", 3, 0.5).mean_rate == 3
    assert Arrivals("ramp", 1, end_rate=4).mean_rate == 2.5
    assert Arrivals("ramp", 1, end_rate=4).scaled(2) == Arrivals("ramp", 2, end_rate=8)
