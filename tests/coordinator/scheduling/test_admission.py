import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.admission import (
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    DepartureRate,
    QueueBounds,
    check_pools,
    check_queue,
    split_startable,
)
from coordinator.scheduling.queueing import QueueEntry
from pdserve.core.errors import ErrorReason, PdserveError
from tests.support.worker_views import DECODE, PREFILL, info, view


def entry(num_prompt_tokens: int = 4, max_tokens: int = 4, key: int = 0) -> QueueEntry:
    return QueueEntry(key, num_prompt_tokens, max_tokens, arrival_s=0.0, deadline_s=1.0)


def pools(prefill_blocks: int, decode_blocks: int, free: int | None = None) -> list:
    return [
        view(info("p0", PREFILL), usable=prefill_blocks),
        view(info("d0", DECODE), usable=decode_blocks, free=decode_blocks if free is None else free),
    ]


@pytest.mark.parametrize("blocks", [1, 7, 10])
def test_u_blocks_fit_and_one_token_more_does_not(blocks: int) -> None:
    """I02 on both pools; blocks hold 4 tokens."""
    check_pools("m", pools(blocks, 100), [entry(blocks * 4, 1)])
    check_pools("m", pools(100, blocks), [entry(1, blocks * 4 - 1)] if blocks * 4 > 2 else [])
    for views, too_much in (
        (pools(blocks, 100), entry(blocks * 4 + 1, 1)),
        (pools(100, blocks), entry(1, blocks * 4)),
    ):
        with pytest.raises(PdserveError) as caught:
            check_pools("m", views, [entry(1, 1), too_much])
        assert caught.value.reason is ErrorReason.NEVER_FITS
        assert str(blocks + 1) in caught.value.message


def test_one_token_needs_no_decode_worker() -> None:
    prefill_only = pools(10, 10)[:1]
    check_pools("m", prefill_only, [entry(4, 1)])
    with pytest.raises(PdserveError) as caught:
        check_pools("m", prefill_only, [entry(4, 2)])
    assert caught.value.reason is ErrorReason.NO_WORKERS
    assert caught.value.message == "no decode worker for m is ready"


def test_what_can_start_at_once_does_not_count_as_waiting() -> None:
    views, bounds = pools(100, 100, free=6), QueueBounds(max_requests=2, max_tokens=1000)
    new = [entry(key=i) for i in range(5)]  # two blocks each: three start, two wait
    check_queue([], new, bounds, views)
    check_queue(new[:2], new[2:], bounds, views)
    with pytest.raises(PdserveError) as caught:
        check_queue(new, [entry(key=9)], bounds, views)
    assert caught.value.reason is ErrorReason.QUEUE_FULL


def test_the_token_bound_counts_prompt_and_output() -> None:
    bounds = QueueBounds(max_requests=10, max_tokens=16)
    check_queue([entry()], [entry()], bounds, pools(9, 9, free=0))
    with pytest.raises(PdserveError):
        check_queue([entry()], [entry(), entry()], bounds, pools(9, 9, free=0))


def test_a_head_that_must_wait_holds_up_those_behind() -> None:
    big, small = entry(30, 10, key=1), entry(key=2)
    assert split_startable([small, big, small], pools(9, 99, free=5)) == [big, small]


def test_single_tokens_are_bounded_by_the_queue_alone() -> None:
    assert len(split_startable([entry(4, 1)] * 3, pools(9, 99))) == 3


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=12),
    st.lists(st.integers(-3, 40), min_size=1, max_size=4),
)
def test_startable_entries_fit_into_the_free_blocks(sizes: list[tuple[int, int]], free: list[int]) -> None:
    entries = [entry(prompt, output, key=i) for i, (prompt, output) in enumerate(sizes)]
    views = [view(info(f"d{i}", DECODE), free=blocks) for i, blocks in enumerate(free)]
    waiting = split_startable(entries, views)
    starting = [e for e in entries if e not in waiting]
    assert [e for e in entries if e in waiting] == waiting
    assert sum(-(-e.num_tokens_max // 4) for e in starting) <= sum(max(0, blocks) for blocks in free)


@given(st.lists(st.floats(0, 100), max_size=50), st.integers(0, 10_000))
def test_the_retry_hint_stays_within_limits(gaps_s: list[float], num_ahead: int) -> None:
    rate, now_s = DepartureRate(), 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        rate.record(now_s)
    assert MIN_RETRY_AFTER_S <= rate.retry_after_s(num_ahead, now_s) <= MAX_RETRY_AFTER_S


def test_the_retry_hint_follows_the_pace() -> None:
    rate = DepartureRate()
    for i in range(100):
        rate.record(i * 0.5)
    assert rate.retry_after_s(20, 50.0) == pytest.approx(10.0, rel=0.1)
