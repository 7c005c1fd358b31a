"""Where the time of each completed request went, by the server's own timings and the client's. Judges nothing.

The server's TTFT is queue + reserve + prefill, and its prefill time runs from the reservation to the first token, so it
includes the wait for the prefill worker, which is told apart here. Its decode time runs from the first token to the
last and includes the exposed transfer, which is taken out of it here. So the phases of a request add up to its E2E.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pdserve_bench.compare.estimates import Estimate, LineFit, quantile, theil_sen
from pdserve_bench.load.records import Outcome, RequestRecord, ServerTimings


class Phase(StrEnum):
    """In the order in which a request passes them; streaming is whatever the client saw beyond the server's time."""

    QUEUE = "queue"
    RESERVE = "reserve"
    PREFILL_WAIT = "prefill wait"
    PREFILL = "prefill"
    TRANSFER = "exposed transfer"
    DECODE = "decode"
    STREAMING = "streaming"


SAME_STEP_S = 0.001
"""First tokens of one worker this close came from one step, which computed all their prompts."""


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Of one completed request. `num_computed_tokens`: of its prompt, those that were not cached.

    `alone`: no other prompt's first token came from the same step, so that its prefill time is its own.
    """

    number: int
    num_computed_tokens: int
    num_output_tokens: int
    seconds: Mapping[Phase, float]
    alone: bool = True

    @property
    def e2e_s(self) -> float:
        """From the client's send to the last token."""
        return sum(self.seconds.values())

    @property
    def decode_per_token_s(self) -> float | None:
        """Decode time less the exposed transfer, a token after the first; None where there is none."""
        if self.num_output_tokens < 2:
            return None
        return self.seconds[Phase.DECODE] / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """Of a run's completed requests; seconds, also per token. None where nothing can be said.

    `prefill`: its fixed part is the cost of a prefill whatever its length, its slope the time per computed token.
    """

    count: int
    median: Mapping[Phase, Estimate]
    p90: Mapping[Phase, Estimate]
    prefill: LineFit | None
    decode_per_token: Estimate | None


def phase_times(records: Sequence[RequestRecord]) -> list[PhaseTimes]:
    """Of every completed request whose server gave timings."""
    timed = [
        (record, record.server)
        for record in records
        if record.outcome is Outcome.COMPLETED and record.server is not None and record.sent_s is not None
    ]
    waits = _prefill_waits(timed)
    return [_times(record, server, *waits[record.number]) for record, server in timed]


def phase_figures(times: Sequence[PhaseTimes]) -> PhaseFigures:
    alone = [one for one in times if one.alone]
    per_token = [one.decode_per_token_s for one in times if one.decode_per_token_s is not None]
    return PhaseFigures(
        count=len(times),
        median=_quantiles(times, 0.5),
        p90=_quantiles(times, 0.9),
        prefill=theil_sen(
            [float(one.num_computed_tokens) for one in alone], [one.seconds[Phase.PREFILL] for one in alone]
        ),
        decode_per_token=quantile(per_token, 0.5),
    )


def _quantiles(times: Sequence[PhaseTimes], share: float) -> dict[Phase, Estimate]:
    found = {phase: quantile([one.seconds[phase] for one in times], share) for phase in Phase}
    return {phase: estimate for phase, estimate in found.items() if estimate is not None}


def _times(record: RequestRecord, server: ServerTimings, wait_s: float, alone: bool) -> PhaseTimes:
    last_s = record.events[-1].at_s if record.events else (record.ended_s or 0.0)
    seen_s = last_s - (record.sent_s or 0.0)
    transfer_s = min(server.exposed_transfer_s, server.decode_s)
    return PhaseTimes(
        number=record.number,
        num_computed_tokens=record.num_prompt_tokens - (record.num_cached_tokens or 0),
        num_output_tokens=record.num_output_tokens,
        seconds={
            Phase.QUEUE: server.queue_s,
            Phase.RESERVE: server.reserve_s,
            Phase.PREFILL_WAIT: wait_s,
            Phase.PREFILL: server.prefill_s - wait_s,
            Phase.TRANSFER: transfer_s,
            Phase.DECODE: server.decode_s - transfer_s,
            Phase.STREAMING: max(0.0, seen_s - server.ttft_s - server.decode_s),
        },
        alone=alone,
    )


def _prefill_waits(timed: Sequence[tuple[RequestRecord, ServerTimings]]) -> dict[int, tuple[float, bool]]:
    """By request number: how long it waited while its prefill worker was at others, and whether its step was its own.

    A worker computes one step at a time, so a prompt's own time begins when it was placed or, if that is later, with
    the worker's last first token before its own (Lindley's recursion). Only completed requests are seen.
    """
    by_worker: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for record, server in timed:
        first_token_s = (record.sent_s or 0.0) + server.queue_s + server.reserve_s + server.prefill_s
        by_worker[server.prefill_worker].append((first_token_s, server.prefill_s, record.number))
    waits: dict[int, tuple[float, bool]] = {}
    for ends in by_worker.values():
        waits |= _waits_of_worker(sorted(ends))
    return waits


def _waits_of_worker(ends: Sequence[tuple[float, float, int]]) -> dict[int, tuple[float, bool]]:
    waits: dict[int, tuple[float, bool]] = {}
    free_s = float("-inf")
    for step in _steps(ends):
        for first_token_s, prefill_s, number in step:
            placed_s = first_token_s - prefill_s
            waits[number] = (min(max(0.0, free_s - placed_s), prefill_s), len(step) == 1)
        free_s = step[-1][0]
    return waits


def _steps(ends: Sequence[tuple[float, float, int]]) -> list[list[tuple[float, float, int]]]:
    """First tokens in order, those of one step together."""
    steps: list[list[tuple[float, float, int]]] = []
    for end in ends:
        if steps and end[0] - steps[-1][-1][0] < SAME_STEP_S:
            steps[-1].append(end)
        else:
            steps.append([end])
    return steps
