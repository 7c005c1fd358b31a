"""Runs made up by formula: every phase of every request takes the time that a test says it took."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from pdserve_bench.load.records import ClientLimits, Outcome, RequestRecord, RunResult, ServerTimings, TokenEvent

IDLE_CLIENT = ClientLimits(0.001, 0.002, 0.002, 0.1, 4)


@dataclass(frozen=True)
class Shape:
    """Of every request, in seconds; `jitter_s`: the widest deviation of each phase, drawn anew for each run."""

    queue_s: float = 0.001
    reserve_s: float = 0.002
    prefill_fixed_s: float = 0.020
    prefill_token_s: float = 0.0005
    transfer_s: float = 0.010
    decode_token_s: float = 0.030
    streaming_s: float = 0.002
    jitter_s: float = 0.002
    gap_s: float = 1.0
    num_requests: int = 60
    num_output_tokens: int = 11


def record(
    shape: Shape, number: int, noise: Callable[[], float] = lambda: 0.0, num_prompt_tokens: int | None = None
) -> RequestRecord:
    num_prompt_tokens = 50 + 37 * number % 700 if num_prompt_tokens is None else num_prompt_tokens
    queue_s, reserve_s, transfer_s = (value + noise() for value in (shape.queue_s, shape.reserve_s, shape.transfer_s))
    prefill_s = shape.prefill_fixed_s + shape.prefill_token_s * num_prompt_tokens + noise()
    steps = shape.num_output_tokens - 1
    decode_s = transfer_s + steps * (shape.decode_token_s + noise() / 5)
    ttft_s = queue_s + reserve_s + prefill_s
    sent_s = number * shape.gap_s
    first_s = sent_s + ttft_s + shape.streaming_s
    last_s = first_s + decode_s
    events = [TokenEvent(first_s, 1)] + [TokenEvent(last_s, steps)] * bool(steps)
    server = ServerTimings(queue_s, reserve_s, prefill_s, transfer_s, decode_s, ttft_s, "prefill-0", "decode-0")
    return RequestRecord(
        number=number,
        request_class="default",
        tenant="",
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=shape.num_output_tokens,
        scheduled_s=sent_s,
        outcome=Outcome.COMPLETED,
        sent_s=sent_s,
        ended_s=last_s,
        events=tuple(events),
        num_output_tokens=shape.num_output_tokens,
        num_counted_tokens=shape.num_output_tokens,
        server=server,
    )


def run_of(shape: Shape, seed: int = 0) -> RunResult:
    draw = random.Random(seed)
    records = [record(shape, number, lambda: draw.uniform(0.0, shape.jitter_s)) for number in range(shape.num_requests)]
    return as_run(records)


def as_run(records: list[RequestRecord]) -> RunResult:
    duration_s = max((one.ended_s or one.scheduled_s for one in records), default=1.0)
    return RunResult("made up", {}, 0.0, duration_s, tuple(records), IDLE_CLIENT)


def moved(one: RequestRecord, number: int, sent_s: float, **server: object) -> RequestRecord:
    """The same request, sent at another time and numbered anew, with some of the server's timings changed."""
    assert one.server is not None
    by_s = sent_s - (one.sent_s or 0.0)
    events = tuple(TokenEvent(event.at_s + by_s, event.num_tokens) for event in one.events)
    timings = replace(one.server, **server)  # type: ignore[arg-type]
    return replace(one, number=number, scheduled_s=sent_s, sent_s=sent_s, events=events, server=timings)
