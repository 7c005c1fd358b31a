import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pdserve_bench.pages import thinning

_samples = st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=300).map(np.array)


@given(_samples, st.integers(10, 400))
def test_a_thinned_cdf_keeps_its_ends_and_stays_on_the_curve(samples: np.ndarray, max_points: int) -> None:
    values, shares = thinning.cdf(samples, max_points)
    assert values.size <= max_points
    assert values[0] == samples.min()
    assert values[-1] == samples.max()
    assert shares[-1] == 1.0
    assert (np.diff(shares) > 0).all()
    ranks = np.round(shares * samples.size).astype(int) - 1
    assert (np.sort(samples)[ranks] == values).all()


def test_the_tail_of_a_cdf_is_kept_closer_than_its_body() -> None:
    samples = np.arange(100_000.0)
    values, _ = thinning.cdf(samples)
    assert values.size <= 400
    assert {99_999.0, 99_998.0, 99_997.0} <= set(values.tolist())


@given(
    st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e3)), min_size=1, max_size=300).map(np.array),
    st.integers(1, 400),
)
def test_thinned_series_keep_the_worst_and_only_what_was_measured(points: np.ndarray, num_slots: int) -> None:
    at_s, values, slot_s = thinning.worst_per_slot(points[:, 0], points[:, 1], num_slots)
    assert at_s.size <= max(num_slots, 1)
    assert values.max() == points[:, 1].max()
    if slot_s:
        assert set(zip(at_s, values, strict=True)) <= {tuple(point) for point in points}
    elif len(points) <= num_slots:
        assert at_s.size == len(points)
    assert (np.diff(at_s) >= 0).all()


def test_every_slot_keeps_its_own_worst() -> None:
    at_s = np.arange(1000) / 100
    values = np.where(np.arange(1000) % 100 == 37, 5.0, 1.0)
    kept_at_s, kept, slot_s = thinning.worst_per_slot(at_s, values, num_slots=10)
    assert slot_s == 0.999
    assert kept.tolist() == [5.0] * 10
    assert kept_at_s.round(2).tolist() == [second + 0.37 for second in range(10)]
