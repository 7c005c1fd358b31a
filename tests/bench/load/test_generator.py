"""The open loop: what is sent when, how each request ends, and that the client itself holds nothing back."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from pdserve_bench.load.client import Answer, NoteTokens, RequestError
from pdserve_bench.load.flight import verdict
from pdserve_bench.load.generator import Progress, RunOptions, run_plan
from pdserve_bench.load.openai_http import OpenAiClient
from pdserve_bench.load.own_limits import warnings
from pdserve_bench.load.plan import LoadPlan, PlannedRequest
from pdserve_bench.load.records import Outcome, RequestRecord, RunResult
from tests.support.timed_server import MODEL, Behaviour, TimedServer

WAIT_S = 20.0
GOOD = Answer("length", 3, 1, True, "a b c")


def planned(times_s: Sequence[float], max_tokens: int = 3, **fields: Any) -> LoadPlan:
    """The first token of a prompt is its request's number."""
    return LoadPlan(
        tuple(PlannedRequest(i, at_s, (i, 7), max_tokens, **fields) for i, at_s in enumerate(times_s)),
        seed=4,
        about={"arrivals": "by hand"},
    )


async def run_on(server: TimedServer, plan: LoadPlan, options: RunOptions | None = None, **more: Any) -> RunResult:
    client = OpenAiClient(server.base_url, MODEL)
    try:
        return await run_plan(plan, client, options or RunOptions(drain_s=WAIT_S), "run", **more)
    finally:
        await client.close()


def outcomes(result: RunResult) -> list[str]:
    return [record.outcome.value for record in result.records]


class ScriptedClient:
    """`send` is given the request and `note`; what it does, the test says."""

    def __init__(self, send: Callable[[PlannedRequest, NoteTokens], Any]) -> None:
        self.send = send

    async def close(self) -> None: ...


async def answer_at_once(request: PlannedRequest, note: NoteTokens) -> Answer:
    note(request.max_tokens)
    return replace(GOOD, num_output_tokens=request.max_tokens)


async def never(request: PlannedRequest, note: NoteTokens) -> Answer:
    note(2)
    await asyncio.Event().wait()
    raise AssertionError


def as_set(measured_s: float, set_s: float, slack_s: float) -> bool:
    """Within 5%, but for what a busy machine made the event loop late (`slack_s`)."""
    return 0.95 * set_s <= measured_s <= 1.05 * set_s + slack_s


# --- field cases ------------------------------------------------------------------------------------------------------


async def test_j01_latency_counts_from_the_schedule_though_a_cap_holds_requests_in_the_client() -> None:
    plan = planned([0.1 * i for i in range(8)])
    async with TimedServer(lambda _: Behaviour(first_token_s=0.5), one_at_a_time=True) as server:
        result = await run_on(server, plan, RunOptions(max_concurrency=1))
    assert set(outcomes(result)) == {"completed"}
    from_schedule = [record.ttft_s or 0.0 for record in result.records]
    from_send = [record.ttft_from_send_s or 0.0 for record in result.records]
    lag_s = result.limits.loop_lag_max_s
    assert as_set(mean(from_schedule), 1.90, slack_s=8 * lag_s)
    assert as_set(max(from_schedule), 3.30, slack_s=8 * lag_s)
    assert as_set(mean(from_send), 0.5, slack_s=lag_s)
    assert [record.scheduled_s for record in result.records] == [request.at_s for request in plan.requests]
    assert (server.peak_in_flight, result.limits.peak_in_flight) == (1, 1)
    assert as_set(result.limits.dispatch_lag_p99_s, 2.77, slack_s=8 * lag_s)
    assert any("left the client late" in sentence for sentence in warnings(result))


async def test_j01_without_a_cap_the_wait_is_the_servers_and_is_seen_by_both() -> None:
    plan = planned([0.05 * i for i in range(8)])
    async with TimedServer(lambda _: Behaviour(first_token_s=0.1), one_at_a_time=True) as server:
        result = await run_on(server, plan)
    last = result.records[-1]
    assert last.ttft_s is not None
    assert last.ttft_s > 0.44
    assert last.ttft_from_send_s == pytest.approx(last.ttft_s, rel=0.2)


async def test_j02_records_count_tokens_of_the_usage_and_itl_is_per_token() -> None:
    behaviour = Behaviour(tokens_per_chunk=tuple(range(1, 9)), chunk_s=0.002)
    async with TimedServer(lambda _: behaviour) as server:
        (record,) = (await run_on(server, planned([0.0], max_tokens=64))).records
    assert (record.num_output_tokens, record.num_counted_tokens, record.counts_are_exact) == (64, 64, True)
    assert len(record.itls_s) == 63
    assert record.tpot_s == pytest.approx((record.events[-1].at_s - record.events[0].at_s) / 63)
    assert [event.num_tokens for event in record.events] == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7]
    assert record.output == "".join(f"é{number} " for number in range(64))


async def test_j05_every_kind_of_end_is_counted_as_what_it_is() -> None:
    ends = [Behaviour()] * 80 + [Behaviour(end="error", num_before_end=2)] * 10
    ends += [Behaviour(end="empty")] * 5 + [Behaviour(end="never", num_before_end=2)] * 5
    async with TimedServer(lambda prompt: ends[prompt[0]]) as server:
        result = await run_on(server, planned([i * 0.002 for i in range(100)]), RunOptions(drain_s=2.0))
        await asyncio.wait_for(server.hung_up.wait(), WAIT_S)
    assert outcomes(result) == ["completed"] * 80 + ["failed"] * 15 + ["unfinished"] * 5
    failed, empty, unfinished = result.records[85], result.records[93], result.records[97]
    assert (failed.num_counted_tokens, len(failed.events), failed.ended_s is not None) == (2, 2, True)
    assert "as set" in failed.error
    assert empty.error == "an answer without tokens: 0 by its usage, 0 in its events"
    assert (unfinished.num_output_tokens, unfinished.ended_s, unfinished.counts_are_exact) == (2, None, True)
    assert result.duration_s >= max(event.at_s for record in result.records for event in record.events)
    assert not result.interrupted


async def test_j07_as_many_requests_are_in_flight_at_the_server_as_the_plan_has_at_once() -> None:
    async with TimedServer(hold_until=256) as server:
        result = await run_on(server, planned([0.0] * 300), RunOptions(max_concurrency=256))
    assert set(outcomes(result)) == {"completed"}
    assert (server.peak_in_flight, result.limits.peak_in_flight) == (256, 256)
    assert result.limits.cores > 0
    assert result.limits.loop_lag_max_s >= result.limits.loop_lag_p99_s > 0


# --- the open loop ----------------------------------------------------------------------------------------------------


async def test_a_server_that_stalls_is_asked_no_less() -> None:
    plan = planned([0.0, 0.01, 0.02, 0.03])
    async with TimedServer(hold_until=4) as server:
        result = await run_on(server, plan)
    assert outcomes(result) == ["completed"] * 4
    for record, request in zip(result.records, plan.requests, strict=True):
        assert record.sent_s is not None
        assert record.sent_s >= request.at_s


async def test_a_cap_keeps_order_and_lets_in_the_next_however_one_ends() -> None:
    order: list[int] = []

    async def send(request: PlannedRequest, note: NoteTokens) -> Answer:
        order.append(request.number)
        await asyncio.sleep(0)
        if request.number % 2:
            raise RequestError("no", rejected=request.number % 4 == 1)
        return await answer_at_once(request, note)

    result = await run_plan(planned([0.0] * 8), ScriptedClient(send), RunOptions(max_concurrency=2), "run")
    assert order == list(range(8))
    assert outcomes(result) == ["completed", "rejected", "completed", "failed"] * 2
    assert result.limits.peak_in_flight == 2


async def test_planned_cancellations_hang_up_after_their_tokens() -> None:
    plan = planned([0.0, 0.0], max_tokens=8)
    plan = replace(plan, requests=(replace(plan.requests[0], cancel_after_tokens=3), plan.requests[1]))
    behaviour = Behaviour(tokens_per_chunk=(2,), chunk_s=0.01)
    async with TimedServer(lambda _: behaviour) as server:
        result = await run_on(server, plan)
        await asyncio.wait_for(server.hung_up.wait(), WAIT_S)
    cancelled, completed = result.records
    assert (cancelled.outcome, cancelled.num_output_tokens) == (Outcome.CANCELLED, 4)
    assert cancelled.ended_s is not None
    assert (completed.outcome, completed.num_output_tokens) == (Outcome.COMPLETED, 8)


async def test_a_cancellation_that_falls_into_the_last_event_counts_as_one() -> None:
    plan = planned([0.0], cancel_after_tokens=3)
    result = await run_plan(plan, ScriptedClient(answer_at_once), RunOptions(), "run")
    assert outcomes(result) == ["cancelled"]


async def test_stop_ends_a_run_at_once_and_keeps_what_was_measured() -> None:
    stop, seen = asyncio.Event(), list[Progress]()

    async def send(request: PlannedRequest, note: NoteTokens) -> Answer:
        if request.number == 0:
            return await answer_at_once(request, note)
        asyncio.get_running_loop().call_soon(stop.set)
        return await never(request, note)

    plan = planned([0.0, 0.01, 3600.0])
    result = await asyncio.wait_for(
        run_plan(plan, ScriptedClient(send), RunOptions(), "run", seen.append, stop), WAIT_S
    )
    assert result.interrupted
    assert outcomes(result) == ["completed", "unfinished", "unfinished"]
    done, running, unsent = result.records
    assert (done.num_output_tokens, running.num_output_tokens, unsent.sent_s) == (3, 2, None)
    assert (done.ended_s is not None, running.ended_s, unsent.ended_s) == (True, None, None)
    assert result.limits.dispatch_lag_p99_s < 3.0, "one that is not due yet is not late"
    assert seen[0].num_offered == seen[-1].num_offered == 3
    assert (seen[-1].num_sent, seen[-1].num_in_flight) == (2, 0)


async def test_one_that_the_cap_never_let_out_is_unfinished_and_late() -> None:
    options = RunOptions(max_concurrency=1, drain_s=0.2)
    result = await run_plan(planned([0.0, 0.0]), ScriptedClient(never), options, "run")
    assert outcomes(result) == ["unfinished", "unfinished"]
    assert [record.sent_s is None for record in result.records] == [False, True]
    assert result.duration_s >= 0.2
    assert result.limits.dispatch_lag_p99_s > 0.9 * result.duration_s
    assert not result.interrupted


async def test_a_cancelled_run_leaves_no_task() -> None:
    running = asyncio.Event()

    async def send(request: PlannedRequest, note: NoteTokens) -> Answer:
        running.set()
        return await never(request, note)

    task = asyncio.create_task(run_plan(planned([0.0, 3600.0]), ScriptedClient(send), RunOptions(), "run"))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_fault_of_the_client_is_not_taken_for_the_servers() -> None:
    async def send(request: PlannedRequest, note: NoteTokens) -> Answer:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        await run_plan(planned([0.0]), ScriptedClient(send), RunOptions(), "run")
    assert caught.group_contains(ZeroDivisionError)


async def test_a_result_says_what_was_run_and_survives_json() -> None:
    result = await run_plan(planned([0.0]), ScriptedClient(answer_at_once), RunOptions(3, 1.5), "ours")
    assert result.name == "ours"
    assert result.about == {
        "arrivals": "by hand",
        "seed": 4,
        "intended_hit_rate": 0.0,
        "max_concurrency": 3,
        "drain_s": 1.5,
    }
    assert RunResult.from_json(result.to_json()) == result
    (record,) = result.records
    assert replace(record, sent_s=None, ended_s=None, events=()) == RequestRecord(
        number=0,
        request_class="default",
        tenant="",
        num_prompt_tokens=2,
        max_tokens=3,
        scheduled_s=0.0,
        outcome=Outcome.COMPLETED,
        num_output_tokens=3,
        num_counted_tokens=3,
        num_cached_tokens=1,
        finish_reason="length",
        output="a b c",
    )


async def test_an_empty_plan_is_a_run_without_records() -> None:
    result = await run_plan(LoadPlan((), 0), ScriptedClient(never), RunOptions(), "run")
    assert (result.records, result.limits.peak_in_flight, result.interrupted) == ((), 0, False)


@pytest.mark.parametrize("options", [{"max_concurrency": 0}, {"drain_s": -1.0}])
def test_options_without_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        RunOptions(**options)


@pytest.mark.parametrize(
    ("finish_reason", "num_by_usage", "num_counted", "outcome"),
    [
        ("length", 3, 3, "completed"),
        ("length", 3, 1, "completed"),
        ("length", None, 3, "completed"),
        ("stop", 2, 2, "completed"),
        ("length", 2, 2, "failed"),
        ("length", None, 2, "failed"),
        ("", 2, 2, "failed"),
        ("error", 3, 3, "failed"),
        ("abort", 3, 3, "failed"),
        ("length", 0, 0, "failed"),
        ("stop", 0, 0, "failed"),
        ("length", 3, 0, "failed"),
        ("stop", 0, 3, "failed"),
    ],
)
def test_which_answers_are_complete(
    finish_reason: str, num_by_usage: int | None, num_counted: int, outcome: str
) -> None:
    answer = Answer(finish_reason, num_by_usage, None, True, "")
    found, error = verdict(planned([0.0]).requests[0], answer, num_counted)
    assert (found.value, error == "") == (outcome, outcome == "completed")
