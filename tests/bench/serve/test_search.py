"""The search for the highest rate: against servers with a known limit, some of them fickle."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_bench.serve.search import Bisection, Found, SearchConfig, Trial, search

LIMITS = st.floats(0.02, 900)


def _ended(bisection: Bisection, limit: float) -> Bisection:
    while (rate := bisection.next_rate()) is not None:
        bisection.record(rate, [rate <= limit])
    return bisection


@given(limit=LIMITS, start=st.floats(0.01, 1000), tolerance=st.floats(0.01, 0.5))
def test_it_converges_on_any_limit(limit: float, start: float, tolerance: float) -> None:
    bisection = _ended(Bisection(SearchConfig(start, tolerance=tolerance, max_probes=40)), limit)
    assert bisection.converged
    assert bisection.found is not None
    assert bisection.found <= limit <= bisection.found * (1 + tolerance)
    assert not bisection.inconsistencies


@given(limit=LIMITS, start=st.floats(0.01, 1000))
def test_few_probes_are_enough(limit: float, start: float) -> None:
    """One for each doubling between start and limit, and four within a bracket of 2 at 5%."""
    bisection = _ended(Bisection(SearchConfig(start, max_probes=1000)), limit)
    assert len(bisection.probes) <= 2 + 17 + 4


@given(limit=LIMITS, max_probes=st.integers(1, 10))
def test_the_number_of_probes_is_bounded(limit: float, max_probes: int) -> None:
    bisection = _ended(Bisection(SearchConfig(max_probes=max_probes)), limit)
    assert len(bisection.probes) <= max_probes
    assert bisection.found is None or bisection.found <= limit


@given(votes=st.lists(st.tuples(st.floats(0.1, 10), st.booleans()), min_size=1, max_size=12))
def test_it_ends_and_finds_nothing_above_a_failure_whatever_is_measured(votes: list[tuple[float, bool]]) -> None:
    bisection = Bisection(SearchConfig(max_probes=20))
    for rate, passed in votes:
        bisection.record(rate, [passed])
    assert all(bisection.found is None or bisection.found < rate for rate, passed in votes if not passed)
    while (rate := bisection.next_rate()) is not None:
        assert 0.01 <= rate <= 1000
        bisection.record(rate, [False])
    assert len(bisection.probes) <= 20


def test_a_failure_below_a_pass_is_reported() -> None:
    bisection = Bisection(SearchConfig())
    bisection.record(2.0, [False, False, True])
    bisection.record(4.0, [True, True])
    (pair,) = bisection.inconsistencies
    assert [probe.rate for probe in pair] == [2.0, 4.0]
    assert bisection.found is None
    assert bisection.next_rate() == 1.0


def _search(config: SearchConfig, goodput: dict[int, float | None], limit: float) -> tuple[Found, list[Trial]]:
    """`goodput`: by number of a run, in place of what a server with that limit gives."""
    noted: list[Trial] = []

    async def measure(rate: float, repeat: int) -> float | None:
        assert repeat == (noted[-1].repeat + 1 if noted and noted[-1].rate == rate else 0)
        return goodput.get(len(noted), 1.0 if rate <= limit else 0.5)

    return asyncio.run(search(config, measure, noted.append)), noted


@given(limit=st.floats(0.1, 100), flipped=st.integers(0, 40))
def test_one_flipped_run_changes_nothing(limit: float, flipped: int) -> None:
    config = SearchConfig()
    steady, _ = _search(config, {}, limit)
    at = [trial for trial in steady.trials if trial.repeat == 0]
    wrong = 0.5 if flipped // 2 < len(at) and at[flipped // 2].passed else 1.0
    fickle, _ = _search(config, {flipped: wrong}, limit)
    assert (fickle.rate, fickle.failing_rate) == (steady.rate, steady.failing_rate)


def test_a_probe_ends_once_it_is_decided() -> None:
    found, noted = _search(SearchConfig(start_rate=4), {0: 0.5}, 5.0)
    assert [(trial.rate, trial.passed) for trial in noted[:5]] == [
        (4, False),
        (4, True),
        (4, True),
        (8, False),
        (8, False),
    ]
    assert found.converged
    assert found.rate is not None
    assert found.rate <= 5.0 <= found.rate * 1.05


def test_an_interrupted_search_keeps_the_best_so_far() -> None:
    found, _ = _search(SearchConfig(repeats=1), {3: None}, 100.0)
    assert (found.rate, found.failing_rate, found.converged, found.interrupted) == (4, None, False, True)
    assert [trial.rate for trial in found.trials] == [1, 2, 4]


def test_a_server_that_never_passes_and_one_that_always_does() -> None:
    none, _ = _search(SearchConfig(repeats=1, min_rate=0.25), {}, 0.0)
    assert (none.rate, none.failing_rate, none.converged) == (None, 0.25, False)
    every, _ = _search(SearchConfig(repeats=1, max_rate=6), {}, 1e9)
    assert (every.rate, every.failing_rate, every.converged) == (6, None, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start_rate": 0.001}, "rates must rise"),
        ({"min_rate": 0.0}, "rates must rise"),
        ({"threshold": 1.5}, "threshold 1.5"),
        ({"tolerance": 0.0}, "tolerance 0 "),
        ({"repeats": 2}, "2 repeats can be a tie"),
        ({"max_probes": 0}, "0 probes"),
    ],
)
def test_what_makes_no_search_is_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchConfig(**change)  # type: ignore[arg-type]
