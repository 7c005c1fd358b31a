"""Demand of classes beside what workers do."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pdserve_bench.compare.demand import (
    TARGET_UTILISATION,
    ClassDemand,
    Demand,
    WorkerRates,
    class_demand,
    demand_sentence,
    demand_table,
)

CHAT = ClassDemand("chat", rate_per_s=2.0, prompt_tokens=100.0, output_tokens=50.0, residence_s=3.0)
RAG = ClassDemand("rag", rate_per_s=0.5, prompt_tokens=1500.0, output_tokens=40.0, residence_s=4.0)
DEMAND = Demand((CHAT, RAG), WorkerRates(700.0, 160.0, kv_bytes=200e6))


def test_demand_is_the_sum_over_classes() -> None:
    assert DEMAND.prompt_rate == pytest.approx(2.0 * 100 + 0.5 * 1500)
    assert DEMAND.output_rate == pytest.approx(2.0 * 50 + 0.5 * 40)
    assert DEMAND.prefill_utilisation == pytest.approx(950 / 700)
    assert DEMAND.decode_utilisation == pytest.approx(120 / 160)


def test_kv_by_littles_law() -> None:
    """6 chats of 150 tokens and 2 documents of 1,540 are there at a time, 23,040 bytes a token."""
    assert CHAT.kv_bytes(23_040) == pytest.approx(6 * 150 * 23_040)
    assert DEMAND.kv_bytes == pytest.approx((6 * 150 + 2 * 1540) * 23_040)


def test_workers_keep_each_phase_below_the_target() -> None:
    assert (DEMAND.num_prefill, DEMAND.num_decode, DEMAND.ratio) == (2, 1, (2, 1))


def test_memory_alone_may_ask_for_decode_workers() -> None:
    small = Demand((CHAT, RAG), WorkerRates(7000.0, 1600.0, kv_bytes=30e6))
    assert small.num_decode == 4
    assert Demand((CHAT, RAG), WorkerRates(7000.0, 1600.0)).num_decode == 1


@given(st.floats(0.01, 50), st.floats(1, 4000), st.floats(1, 2000), st.floats(10, 1e5), st.floats(10, 1e4))
def test_enough_workers_and_not_one_too_many(
    rate: float, prompt: float, output: float, fast: float, slow: float
) -> None:
    demand = Demand((ClassDemand("a", rate, prompt, output, 1.0),), WorkerRates(fast, slow))
    for utilisation, num in (
        (demand.prefill_utilisation, demand.num_prefill),
        (demand.decode_utilisation, demand.num_decode),
    ):
        assert utilisation / num <= TARGET_UTILISATION * (1 + 1e-6)
        assert num == 1 or utilisation / (num - 1) > TARGET_UTILISATION * (1 - 1e-6)


def test_an_equal_demand_is_one_to_one() -> None:
    assert Demand((ClassDemand("a", 1.0, 700.0, 160.0, 1.0),), WorkerRates(700.0, 160.0)).ratio == (1, 1)


def test_a_class_from_what_was_sent() -> None:
    found = class_demand("a", [(100, 10, 2.0), (300, 30, 4.0)], span_s=4.0)
    assert found == ClassDemand("a", 0.5, 200.0, 20.0, 3.0)
    with pytest.raises(ValueError, match="0 requests"):
        class_demand("a", [], span_s=4.0)


@pytest.mark.parametrize("bad", [{"rate_per_s": -1.0}, {"residence_s": float("nan")}])
def test_impossible_figures_are_refused(bad: dict[str, float]) -> None:
    fields = {"rate_per_s": 1.0, "prompt_tokens": 1.0, "output_tokens": 1.0, "residence_s": 1.0}
    with pytest.raises(ValueError, match=next(iter(bad))):
        ClassDemand("a", **(fields | bad))
    with pytest.raises(ValueError, match="above 0"):
        WorkerRates(0.0, 1.0)


def test_table_and_sentence_hold_the_figures() -> None:
    console = Console(file=io.StringIO(), width=160)
    console.print(demand_table(DEMAND))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for shown in ("chat", "rag", "950", "120", "136%", "75%", "91.7", "46%"):
        assert shown in text
    sentence = demand_sentence(DEMAND)
    for shown in ("950 prompt tokens/s", "136%", "75%", "92 MB", "2 prefill and 1 decode", "2:1"):
        assert shown in sentence
