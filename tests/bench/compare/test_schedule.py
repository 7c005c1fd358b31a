"""The order of a comparison's cells: every fleet in every round, the control twice, nobody always first."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_bench.compare.schedule import Cell, schedule

NAMES = st.lists(st.text("abc:1 ", min_size=1, max_size=4), min_size=1, max_size=5, unique=True)
RATES = st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0]), min_size=1, max_size=4, unique=True)


def test_rounds_rotate_and_the_control_comes_again() -> None:
    cells = schedule(["P", "C"], [1.0, 2.0], 2, "C")
    assert [(cell.rate_factor, cell.repeat, cell.label) for cell in cells] == [
        (1.0, 0, "C"),
        (1.0, 0, "P"),
        (1.0, 0, "C (again)"),
        (2.0, 0, "P"),
        (2.0, 0, "C (again)"),
        (2.0, 0, "C"),
        (1.0, 1, "C (again)"),
        (1.0, 1, "C"),
        (1.0, 1, "P"),
        (2.0, 1, "C"),
        (2.0, 1, "P"),
        (2.0, 1, "C (again)"),
    ]


def test_a_cell_has_a_name_of_its_own() -> None:
    assert Cell(1.5, 0, "C", again=True).key == "rate 1.5, repeat 0, C (again)"


@given(NAMES, RATES, st.integers(1, 4), st.data())
def test_every_round_holds_all_turns_once_and_rounds_do_not_mix(
    names: list[str], rates: list[float], num_repeats: int, data: st.DataObject
) -> None:
    control = data.draw(st.sampled_from([None, *names]))
    cells = schedule(names, rates, num_repeats, control)
    turns = {(name, False) for name in names} | ({(control, True)} if control is not None else set())
    assert len({cell.key for cell in cells}) == len(cells) == len(turns) * len(rates) * num_repeats
    rounds = [cells[begin : begin + len(turns)] for begin in range(0, len(cells), len(turns))]
    for one in rounds:
        assert len({(cell.rate_factor, cell.repeat) for cell in one}) == 1
        assert {(cell.fleet, cell.again) for cell in one} == turns
    begins = Counter(one[0].label for one in rounds)
    assert max(begins.values()) - (min(begins.values()) if len(begins) == len(turns) else 0) <= 1


@pytest.mark.parametrize(
    ("names", "rates", "num_repeats", "control", "said"),
    [
        ([], [1.0], 1, None, "nothing to measure"),
        (["a"], [], 1, None, "nothing to measure"),
        (["a"], [1.0], 0, None, "nothing to measure"),
        (["a", "a"], [1.0], 1, None, "fleets must differ: a, a"),
        (["a"], [1.0, 1.0], 1, None, "rates must differ"),
        (["a"], [1.0], 1, "b", "'b' is none of the fleets"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(
    names: list[str], rates: list[float], num_repeats: int, control: str | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        schedule(names, rates, num_repeats, control)
