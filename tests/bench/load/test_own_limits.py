"""What the load generator says about itself."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_bench.load.own_limits import OwnLimitsMeter, late_steps, warnings
from pdserve_bench.load.records import ClientLimits, Outcome, RequestRecord, RunResult, TokenEvent


def result(loop_lag_s: float = 0.001, dispatch_lag_s: float = 0.001, cores: float = 0.2) -> RunResult:
    """Of one request with TTFT 1 s and ITL 20 ms, two tokens an event, and one that failed at once."""
    events = tuple(TokenEvent(1.0 + 0.02 * i, 1) for i in range(5))
    records = (
        RequestRecord(0, "default", "", 4, 5, 0.0, Outcome.COMPLETED, 0.0, 2.0, events, 5, 5),
        RequestRecord(1, "default", "", 4, 5, 0.0, Outcome.FAILED, 0.0, 0.1, (TokenEvent(0.001, 1),), 1, 1),
    )
    limits = ClientLimits(loop_lag_s, loop_lag_s, dispatch_lag_s, cores, 2)
    return RunResult("run", {}, 0.0, 2.0, records, limits)


def test_a_client_with_room_to_spare_says_nothing() -> None:
    assert warnings(result()) == []
    assert warnings(result(loop_lag_s=0.004, dispatch_lag_s=0.1, cores=0.9)) == []


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"dispatch_lag_s": 0.101}, r"left the client late: p99 101\.0 ms .* 10% of the median TTFT \(1000\.0 ms\)"),
        ({"loop_lag_s": 0.0041}, r"lagged: p99 4\.1 ms, over 20% of the median ITL \(20\.0 ms\)"),
        ({"loop_lag_s": 0.0101}, r"lagged: p99 10\.1 ms, over 10\.0 ms"),
        ({"cores": 0.91}, r"took 0\.91 cores"),
    ],
)
def test_each_limit_is_told_in_a_sentence(limits: dict[str, float], said: str) -> None:
    (sentence,) = warnings(result(**limits))
    with pytest.raises(RuntimeError, match=said):
        raise RuntimeError(sentence)


def test_without_any_completed_request_only_absolute_limits_are_judged() -> None:
    nothing = RunResult("run", {}, 0.0, 2.0, (), ClientLimits(0.009, 0.009, 5.0, 0.1, 0))
    assert warnings(nothing) == []


@given(st.lists(st.floats(0.0, 0.5), max_size=20))
def test_every_step_is_counted_once_however_long_the_pauses(pauses_s: list[float]) -> None:
    """A pause of n steps is n late steps, the first by its whole length."""
    now_s, due_s, lags_s = 0.0, 0.01, list[float]()
    for pause_s in pauses_s:
        now_s += pause_s
        lags, due_s = late_steps(due_s, now_s, 0.01)
        assert due_s > now_s
        assert lags == sorted(lags, reverse=True)
        lags_s += lags
    assert len(lags_s) == pytest.approx(now_s / 0.01, abs=1.01)
    assert all(0 <= lag_s <= max(pauses_s, default=0.0) for lag_s in lags_s)


async def test_a_blocked_loop_shows_in_full_and_so_does_its_cpu() -> None:
    async with OwnLimitsMeter() as meter:
        await asyncio.sleep(0.02)
        end_s = time.process_time() + 0.2
        while time.process_time() < end_s:
            pass
        await asyncio.sleep(0.02)
        limits = meter.limits([0.0, 1.0], 7)
    assert limits.loop_lag_max_s >= 0.18
    assert limits.loop_lag_p99_s >= 0.15
    assert 0 < limits.cores <= 1.1
    assert (limits.dispatch_lag_p99_s, limits.peak_in_flight) == (pytest.approx(0.99), 7)
