"""Plans and runs for tests, small ones."""

from pdserve_bench.load.plan import LoadPlan, PlannedRequest
from pdserve_bench.load.records import (
    ClientLimits,
    Outcome,
    RequestRecord,
    RunResult,
    ServerSample,
    ServerTimings,
    TokenEvent,
)


def small_plan(num_requests: int = 3, seed: int = 1, gap_s: float = 0.01, first_id: int = 10) -> LoadPlan:
    """Prompts of five tokens, of which the first two are shared; three tokens each to answer."""
    requests = (
        PlannedRequest(number, number * gap_s, (first_id, first_id + 1, first_id + 20 + seed, 40 + number, 90), 3)
        for number in range(num_requests)
    )
    return LoadPlan(tuple(requests), seed, {"mix": "small"})


def made_run(name: str = "A", itl_s: float = 0.05, *, num_requests: int = 2, interrupted: bool = False) -> RunResult:
    """Each request has its first token after 0.5 s and two more, `itl_s` apart."""
    events = tuple(TokenEvent(0.5 + index * itl_s, 1) for index in range(3))
    timings = ServerTimings(0.1, 0.0, 0.3, 0.0, 2 * itl_s, 0.5, "prefill-0", "decode-0")
    records = (
        RequestRecord(
            number=number,
            request_class="default",
            tenant="",
            num_prompt_tokens=5,
            max_tokens=3,
            scheduled_s=0.0,
            outcome=Outcome.COMPLETED,
            sent_s=0.01,
            ended_s=events[-1].at_s,
            events=events,
            num_output_tokens=3,
            num_counted_tokens=3,
            finish_reason="length",
            server=timings,
        )
        for number in range(num_requests)
    )
    return RunResult(
        name=name,
        about={"mix": "small"},
        begin_unix_s=1.5e9,
        duration_s=1.0,
        records=tuple(records),
        limits=ClientLimits(0.001, 0.002, 0.003, 0.1, 2),
        server_cpu_s={"decode-0": 0.5},
        samples=(ServerSample(0.0, {"x": 1.0}),),
        interrupted=interrupted,
    )
