"""Which loads a sweep measures, and which of them it calls safe."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_bench.serve.capacity import Capacity, Grid, Store, next_load, safe_loads, sweep
from pdserve_bench.serve.cells import Cell, Load, Objectives

GRID = Grid((1.0, 2.0, 4.0), (0, 2))


def cell(load: Load, ttft_p99_s: float = 1.0) -> Cell:
    return Cell(
        rate=load.rate,
        num_documents=load.num_documents,
        duration_s=10.0,
        offered=50,
        completed=50,
        num_failures=0,
        unfinished=0,
        num_expired=0,
        documents_completed=load.num_documents,
        ttft_p50_s=0.5,
        ttft_p99_s=ttft_p99_s,
        itl_p50_s=0.02,
        itl_p99_s=0.05,
        prompt_tokens_per_s=100 * load.rate + 1000 * load.num_documents,
        output_tokens_per_s=10 * load.rate,
        cached_share=0.0,
        peak_block_occupancy=0.5,
        num_allocation_failures=0.0,
        foreign_cores=0.0,
    )


def _swept(
    bears: Callable[[Load], bool], grid: Grid = GRID, store: Store | None = None, stop_after: int = 1000
) -> tuple[Capacity, list[Load]]:
    measured: list[Load] = []

    async def measure(load: Load) -> Cell | None:
        if len(measured) == stop_after:
            return None
        measured.append(load)
        return cell(load, 1.0 if bears(load) else 7.0)

    return asyncio.run(sweep(grid, Objectives(), measure, {} if store is None else store, lambda _: None)), measured


def test_a_load_is_safe_if_it_is_well_at_a_tenth_more() -> None:
    capacity, measured = _swept(lambda load: load.rate + load.num_documents <= 4.1)
    assert measured == [
        *(Load(0, rate) for rate in (1.0, 2.0, 4.0)),
        *(Load(2, rate) for rate in (1.0, 2.0, 4.0)),
        Load(0, 4.4),
        Load(0, 2.2),
        Load(3, 2.2),
        Load(3, 1.1),
    ]
    assert capacity.safe == (Load(0, 2.0), Load(2, 1.0))
    assert capacity.safe_point == Load(2, 1.0), "more tokens a second than without documents"
    missed = {(one["num_documents"], one["rate"]): one["missed"] for one in capacity.to_json()["cells"]}  # type: ignore[attr-defined]
    assert missed[0, 4.4] == ["TTFT p99 7000 ms > 6000 ms"]
    assert missed[0, 2.2] == []


def test_a_safe_load_that_another_exceeds_is_not_the_point() -> None:
    loads = (Load(0, 4.0), Load(1, 4.0), Load(2, 1.0))
    cells = [replace(cell(load), prompt_tokens_per_s=100.0 - number) for number, load in enumerate(loads)]
    assert Capacity(tuple(cells), Objectives(), loads).safe_point == Load(1, 4.0)


def test_more_than_what_failed_is_not_measured() -> None:
    capacity, measured = _swept(lambda load: load.rate < 1.5 and load.num_documents < 2)
    assert measured == [Load(0, 1.0), Load(0, 2.0), Load(2, 1.0), Load(0, 1.1)]
    assert capacity.safe == (Load(0, 1.0),)


def test_nothing_is_safe_where_nothing_is_well() -> None:
    capacity, measured = _swept(lambda _: False)
    assert measured == [Load(0, 1.0)]
    assert (capacity.safe, capacity.safe_point) == ((), None)


loads = st.builds(Load, st.integers(0, 5), st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 8.0]))


@given(loads=st.lists(loads, min_size=1, max_size=8), verdicts=st.lists(st.booleans(), min_size=120, max_size=120))
def test_whatever_is_measured_a_sweep_ends_and_safe_is_measured(loads: list[Load], verdicts: list[bool]) -> None:
    grid = Grid(tuple(load.rate for load in loads), tuple(load.num_documents for load in loads))
    met: dict[Load, bool] = {}
    while (load := next_load(grid, met)) is not None:
        assert load not in met
        met[load] = verdicts[len(met)]
    safe = safe_loads(grid, met)
    assert all(met[load] and met[load.with_margin] for load in safe)
    failed = [load for load, fine in met.items() if not fine]
    assert not any(bad.within(load) for load in safe for bad in failed)
    for load, fine in met.items():
        better = [one for one in safe if one.num_documents == load.num_documents and one.rate >= load.rate]
        if fine and load in grid.loads and not better:
            assert any(bad.within(load.with_margin) for bad in failed), "left out without a reason"


def test_a_sweep_goes_on_where_it_was_interrupted() -> None:
    store: dict[str, object] = {}

    def bears(load: Load) -> bool:
        return load.rate <= 2.5

    cut, first = _swept(bears, store=store, stop_after=4)  # type: ignore[arg-type]
    assert cut.interrupted
    assert len(cut.cells) == 4
    whole, rest = _swept(bears, store=store)  # type: ignore[arg-type]
    alone, every = _swept(bears)
    assert first + rest == every
    assert whole == alone


GOOD = cell(Load(2, 1.0))


@pytest.mark.parametrize(
    ("bad", "missed"),
    [
        (GOOD, []),
        (replace(GOOD, ttft_p99_s=6.001), ["TTFT p99 6001 ms > 6000 ms"]),
        (replace(GOOD, itl_p99_s=0.2), ["ITL p99 200 ms > 100 ms"]),
        (replace(GOOD, itl_p99_s=None), ["no ITL p99: no interactive request gave any"]),
        (replace(GOOD, num_failures=3, num_expired=2), ["3 requests failed, 2 of them in the queue"]),
        (replace(GOOD, unfinished=1), ["1 requests were left over"]),
        (replace(GOOD, documents_completed=0), ["no document was completed"]),
        (replace(GOOD, num_allocation_failures=1.0), ["1 KV allocations failed"]),
        (replace(GOOD, num_allocation_failures=None), []),
    ],
)
def test_what_a_cell_misses_is_told(bad: Cell, missed: list[str]) -> None:
    assert Objectives().missed(bad) == missed
    assert Cell.from_json(bad.to_json()) == bad


@pytest.mark.parametrize(("rates", "documents"), [((), (1,)), ((0.0,), (1,)), ((1.0,), ()), ((1.0,), (-1,))])
def test_what_makes_no_grid_is_refused(rates: tuple[float, ...], documents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected some"):
        Grid(rates, documents)


@given(rate=st.floats(0.01, 100), number=st.integers(0, 1000))
def test_the_margin_is_a_tenth_and_documents_are_whole(rate: float, number: int) -> None:
    more = Load(number, rate).with_margin
    assert more.rate == pytest.approx(1.1 * rate, abs=1e-5)
    assert 1.1 * number - 1e-6 <= more.num_documents < 1.1 * number + 1
