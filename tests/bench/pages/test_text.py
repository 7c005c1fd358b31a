import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_bench.pages import text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0.0, "0 ms"),
        (0.0004567, "0.457 ms"),
        (0.0123, "12.3 ms"),
        (0.09996, "100 ms"),
        (0.4567, "457 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (1.234, "1.23 s"),
        (9.999, "10.0 s"),
        (1234.5, "1\u202f234 s"),
    ],
)
def test_seconds_have_three_digits_that_count(value: float | None, shown: str) -> None:
    assert text.seconds(value) == shown


def test_a_chosen_time_is_shown_as_it_was_chosen() -> None:
    assert [text.objective_s(value) for value in (0.1, 6.0, 0.0375, 2.5)] == ["100 ms", "6 s", "37.5 ms", "2.5 s"]


def test_ratios_counts_and_rates() -> None:
    assert [text.ratio(value) for value in (4.2, 0.21, None, float("inf"))] == ["4.20×", "0.210×", "–", "–"]
    assert [text.count(value) for value in (0, 999, 1234567)] == ["0", "999", "1\u202f234\u202f567"]
    assert text.per_second(87.25, "tok") == "87.2 tok/s"


def test_a_share_reads_as_all_or_none_only_if_it_is() -> None:
    shown = [text.share(value) for value in (0.0, 0.00001, 0.5, 0.99999, 1.0, None)]
    assert shown == ["0.0 %", "< 0.1 %", "50.0 %", "> 99.9 %", "100.0 %", "–"]


@given(st.floats(min_value=1e-6, max_value=1e6))
def test_a_time_that_is_read_back_is_within_half_a_percent(value: float) -> None:
    number, unit = text.seconds(value).replace("\u202f", "").split()
    assert float(number) * {"ms": 0.001, "s": 1.0}[unit] == pytest.approx(value, rel=0.0051)


@given(st.text(st.characters()))
def test_plain_text_is_one_line_that_a_file_can_hold(name: str) -> None:
    plain = text.plain(name)
    plain.encode()
    assert "\n" not in plain
    assert text.plain(plain) == plain
    assert all(char.isprintable() or char == "\u202f" for char in plain)


def test_long_names_are_wrapped_and_cut_and_no_name_is_empty() -> None:
    assert text.wrapped("colocated, 2 threads", 12) == "colocated, 2\nthreads"
    lines = text.wrapped("word " * 100, 20).split("\n")
    assert len(lines) == 3
    assert lines[-1].endswith("…")
    assert text.wrapped(" \n", 10) == "–"
