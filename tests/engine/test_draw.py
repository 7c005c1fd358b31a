"""The shortcuts of the draw against plain sums: sizes past every block and group, ties, and sums on a threshold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine import draw
from tests.support import reference_sampler

SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.sampled_from([1, 7, 511, 512, 513, 1023, 1024, 1500, 4099, 9000])


def rows(seed: int, size: int, *, spread: float = 3.0, step: float = 0.0) -> np.ndarray:
    """Normal values, rounded to multiples of `step` for ties."""
    values = np.random.default_rng(seed).normal(0, spread, size)
    return (np.round(values / step) * step if step else values).astype(np.float32)


@settings(deadline=None)
@given(SEEDS, SIZES, st.sampled_from([0.0, 0.25, 5.0]), st.sampled_from([0, 1, 2, 20, 256, 700, 9000, 9001]))
def test_descending_is_a_sort_with_ties_by_id(seed, size, step, count):
    values = rows(seed, size, step=step)
    values[::5] = -np.inf
    expected = np.lexsort((np.arange(size), -values))[:count]
    np.testing.assert_array_equal(draw.descending(values, count), expected)


@settings(deadline=None)
@given(SEEDS, st.sampled_from([0.1, 3.0, 30.0]))
def test_the_weight_of_an_id_does_not_depend_on_the_ids_beside_it(seed, spread):
    values = rows(seed, 3000, spread=spread)
    highest = values.max()
    ids = np.random.default_rng(seed).choice(3000, seed % 300 + 1)
    np.testing.assert_array_equal(draw.token_weights(values[ids], highest), draw.token_weights(values, highest)[ids])


def index_one_by_one(weights: np.ndarray, fraction: float) -> int:
    running = np.cumsum(weights)
    return int(np.count_nonzero(running <= fraction * running[-1]))


@settings(deadline=None)
@given(SEEDS, SIZES, st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5]))
def test_first_above_equals_the_running_sum(seed, size, fraction, step):
    values = rows(seed, size, step=step)
    weights = draw.token_weights(values, values.max())
    assert draw.first_above(weights, fraction) == index_one_by_one(weights, fraction)


@pytest.mark.parametrize("seed", range(5))
def test_first_above_is_exact_where_a_sum_lies_on_the_threshold(seed):
    """Sums in another order are off by a few units in the last place; so are these fractions."""
    values = rows(seed, 5000)
    weights = draw.token_weights(values, values.max())
    running = np.cumsum(weights)
    for index in (*range(seed, 4999, 97), *range(511, 4999, 512)):
        fraction = running[index] / running[-1]
        for near in (np.nextafter(fraction, 0), fraction, np.nextafter(fraction, 1)):
            assert draw.first_above(weights, near) == index_one_by_one(weights, near)


@pytest.mark.parametrize("fraction", [0.0, 0.25, 1 - 2**-24])
def test_first_above_passes_over_weights_of_zero(fraction):
    weights = np.zeros(4000)
    weights[[600, 1500, 3000]] = 1.0
    assert draw.first_above(weights, fraction) == index_one_by_one(weights, fraction)


def kept(scaled: np.ndarray, top_p: float) -> list[int]:
    return draw._top_p(scaled, scaled.max(), top_p).tolist()


def kept_by_reference(scaled: np.ndarray, top_p: float) -> list[int]:
    weights = reference_sampler.token_weights(scaled)
    return sorted(reference_sampler._top_p(scaled, weights, top_p, None).tolist())


@settings(deadline=None)
@given(
    SEEDS,
    SIZES,
    st.sampled_from([0.001, 0.3, 3.0, 60.0]),
    st.sampled_from([0.0, 0.125]),
    st.floats(2**-20, 1, exclude_max=True),
)
def test_top_p_equals_the_reference(seed, size, spread, step, top_p):
    scaled = rows(seed, size, spread=spread, step=step)
    scaled[:-1:6] = -np.inf
    assert kept(scaled, top_p) == kept_by_reference(scaled, top_p)


@pytest.mark.parametrize("spread", [0.01, 0.5, 2.0])
def test_top_p_is_exact_where_a_sum_lies_on_the_threshold(spread):
    scaled = rows(3, 5000, spread=spread)
    running = np.cumsum(np.sort(draw.token_weights(scaled, scaled.max()))[::-1])
    for index in range(300, 4900, 211):
        top_p = running[index] / running[-1]
        for near in (np.nextafter(top_p, 0), top_p, np.nextafter(top_p, 1)):
            assert kept(scaled, near) == kept_by_reference(scaled, near)


def test_a_flat_distribution_is_not_sorted_whole(monkeypatch):
    descending, counts = draw.descending, []

    def noted(values, count):
        counts.append(count)
        return descending(values, count)

    monkeypatch.setattr(draw, "descending", noted)
    assert len(kept(rows(3, 9000, spread=0.5), 0.9)) > 5000
    assert counts == [draw._FIRST_PREFIX]


def test_blocks_are_enough_for_nearly_every_draw():
    values = rows(3, 9000)
    weights = draw.token_weights(values, values.max())
    fractions = np.random.default_rng(4).random(200)
    assert sum(draw._first_above_by_blocks(weights, fraction) is None for fraction in fractions) < 20
