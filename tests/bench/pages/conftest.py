from collections.abc import Callable, Sequence

import pytest

from pdserve_bench.load.records import ClientLimits, Outcome, RequestRecord, RunResult, TokenEvent

MakeRecord = Callable[..., RequestRecord]
MakeRun = Callable[..., RunResult]


@pytest.fixture
def make_record() -> MakeRecord:
    """A completed request of one token an event, at the given times."""

    def make(
        number: int,
        times_s: Sequence[float],
        scheduled_s: float = 0.0,
        request_class: str = "chat",
        num_prompt_tokens: int = 128,
    ) -> RequestRecord:
        return RequestRecord(
            number=number,
            request_class=request_class,
            tenant="",
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=len(times_s),
            scheduled_s=scheduled_s,
            outcome=Outcome.COMPLETED,
            sent_s=scheduled_s,
            ended_s=times_s[-1] if times_s else scheduled_s,
            events=tuple(TokenEvent(at_s, 1) for at_s in times_s),
            num_output_tokens=len(times_s),
            num_counted_tokens=len(times_s),
        )

    return make


@pytest.fixture
def make_run() -> MakeRun:
    def make(records: Sequence[RequestRecord] = (), name: str = "fleet", duration_s: float = 10.0) -> RunResult:
        limits = ClientLimits(0.001, 0.002, 0.003, 0.25, 7)
        return RunResult(name, {}, 0.0, duration_s, tuple(records), limits, foreign_cores=0.04)

    return make
