"""Records and runs for tests of the figures, with only what a test cares about spelled out."""

from collections.abc import Sequence

from pdserve_bench.load.records import ClientLimits, Outcome, RequestRecord, RunResult, TokenEvent

LIMITS = ClientLimits(loop_lag_p99_s=0.001, loop_lag_max_s=0.002, dispatch_lag_p99_s=0.001, cores=0.1, peak_in_flight=7)


def record(
    number: int = 0, outcome: Outcome = Outcome.COMPLETED, events: Sequence[tuple[float, int]] = (), **more: object
) -> RequestRecord:
    """`events`: (when, how many tokens)."""
    num_tokens = sum(count for _, count in events)
    fields: dict[str, object] = {
        "request_class": "chat",
        "tenant": "",
        "num_prompt_tokens": 100,
        "max_tokens": 8,
        "scheduled_s": 0.0,
        "sent_s": 0.0,
        "num_output_tokens": num_tokens,
        "num_counted_tokens": num_tokens,
        **more,
    }
    return RequestRecord(
        number=number,
        outcome=outcome,
        events=tuple(TokenEvent(at_s, count) for at_s, count in events),
        **fields,  # type: ignore[arg-type]
    )


def run_of(records: Sequence[RequestRecord], duration_s: float = 10.0) -> RunResult:
    return RunResult(
        name="apart",
        about={},
        begin_unix_s=1_796_000_000.0,
        duration_s=duration_s,
        records=tuple(records),
        limits=LIMITS,
    )
