"""Whether the load generator was itself the limit of a run: what it took, and plain words where it took too much."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from pdserve_bench.load.records import ClientLimits, Outcome, RunResult

MAX_DISPATCH_SHARE = 0.1
"""Of the median TTFT."""
MAX_LOOP_LAG_S = 0.01
MAX_LOOP_LAG_SHARE = 0.2
"""Of the median ITL."""
TIMER_GRAIN_S = 0.002
"""An event loop's timers are only good to a millisecond: less than this is no lag."""
MAX_CORES = 0.9
"""The client's Python has one thread, so it is at its end near one core."""

_STEP_S = 0.01


def late_steps(due_s: float, now_s: float, step_s: float) -> tuple[list[float], float]:
    """How late each step is that was due by `now_s`, and when the next one is due.

    Steps keep to their schedule: one pause of the loop counts once for every step that it held up, as it holds up
    every token that comes in it.
    """
    lags: list[float] = []
    while due_s <= now_s:
        lags.append(now_s - due_s)
        due_s += step_s
    return lags, due_s


class OwnLimitsMeter:
    """Watches this process and its event loop while `async with` lasts."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lags_s: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._begin_s = self._begin_cpu_s = 0.0

    async def __aenter__(self) -> Self:
        self._begin_s, self._begin_cpu_s = self._clock_s(), time.process_time()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def limits(self, dispatch_lags_s: Sequence[float], peak_in_flight: int) -> ClientLimits:
        """Up to now."""
        wall_s = max(self._clock_s() - self._begin_s, 1e-9)
        return ClientLimits(
            loop_lag_p99_s=_p99(self._lags_s),
            loop_lag_max_s=max(self._lags_s, default=0.0),
            dispatch_lag_p99_s=_p99(dispatch_lags_s),
            cores=(time.process_time() - self._begin_cpu_s) / wall_s,
            peak_in_flight=peak_in_flight,
        )

    async def _watch(self) -> None:
        due_s = self._begin_s + _STEP_S
        while True:
            await asyncio.sleep(due_s - self._clock_s())
            lags, due_s = late_steps(due_s, self._clock_s(), _STEP_S)
            self._lags_s += lags


def warnings(result: RunResult) -> list[str]:
    """A sentence for each way in which the client was a limit of this run; none where it was not."""
    completed = [record for record in result.records if record.outcome is Outcome.COMPLETED]
    ttft_s = _median([record.ttft_s for record in completed if record.ttft_s is not None])
    gap_s = _median([itl_s for record in completed for itl_s in record.itls_s if itl_s > 0])
    limits = result.limits
    found = [_late_sends(limits, ttft_s), _slow_loop(limits, gap_s), _busy(limits)]
    return [sentence for sentence in found if sentence]


def _late_sends(limits: ClientLimits, ttft_s: float | None) -> str:
    if ttft_s is None or limits.dispatch_lag_p99_s <= MAX_DISPATCH_SHARE * ttft_s:
        return ""
    return (
        f"Requests left the client late: p99 {_ms(limits.dispatch_lag_p99_s)} after their time, over "
        f"{MAX_DISPATCH_SHARE:.0%} of the median TTFT ({_ms(ttft_s)}). A cap on concurrency or a busy client held "
        "them: latencies from the scheduled time include this wait, those from the send do not."
    )


def _slow_loop(limits: ClientLimits, gap_s: float | None) -> str:
    lag_s = limits.loop_lag_p99_s
    if lag_s > MAX_LOOP_LAG_S:
        limit = _ms(MAX_LOOP_LAG_S)
    elif gap_s is not None and lag_s > max(TIMER_GRAIN_S, MAX_LOOP_LAG_SHARE * gap_s):
        limit = f"{MAX_LOOP_LAG_SHARE:.0%} of the median ITL ({_ms(gap_s)})"
    else:
        return ""
    return f"The client's event loop lagged: p99 {_ms(lag_s)}, over {limit}; tokens may have waited so long to be read."


def _busy(limits: ClientLimits) -> str:
    if limits.cores <= MAX_CORES:
        return ""
    return (
        f"The client took {limits.cores:.2f} cores, about all that its one thread can use: it may have been the limit."
    )


def _median(samples: Sequence[float]) -> float | None:
    return float(np.median(samples)) if samples else None


def _p99(samples: Sequence[float]) -> float:
    return float(np.percentile(samples, 99)) if samples else 0.0


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
