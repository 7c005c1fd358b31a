"""The gRPC client against a coordinator with scripted workers."""

import asyncio
import socket
from collections import Counter
from pathlib import Path

import pytest

from pdserve_bench.load.client import Answer, NoteTokens, RequestError
from pdserve_bench.load.generator import RunOptions, run_plan
from pdserve_bench.load.pdserve_grpc import PdserveClient
from pdserve_bench.load.plan import LoadPlan, PlannedRequest
from pdserve_bench.load.records import Outcome, RunResult
from tests.support.front_door import FrontDoor, front_door
from tests.support.scripted_worker import expected_tokens

WAIT_S = 30.0


def planned(num_requests: int, max_tokens: int = 5, cancel_after_tokens: int | None = None) -> LoadPlan:
    return LoadPlan(
        tuple(
            PlannedRequest(i, 0.0, (5 + i % 90, 6, 7), max_tokens, cancel_after_tokens=cancel_after_tokens)
            for i in range(num_requests)
        ),
        seed=0,
    )


async def run_on(door: FrontDoor, plan: LoadPlan) -> RunResult:
    client = PdserveClient(door.grpc_address)
    try:
        return await run_plan(plan, client, RunOptions(drain_s=WAIT_S), "ours")
    finally:
        await client.close()


async def test_tokens_timings_and_cached_tokens_come_as_the_server_has_them(tiny_model: Path) -> None:
    async with front_door(tiny_model) as door:
        door.prefill.script.num_cached_tokens.append(2)
        (record,) = (await run_on(door, planned(1))).records
    assert record.outcome is Outcome.COMPLETED
    assert record.output == " ".join(map(str, expected_tokens((5, 6, 7), 5)))
    assert (record.num_output_tokens, record.num_counted_tokens, record.counts_are_exact) == (5, 5, True)
    assert (record.num_cached_tokens, record.finish_reason) == (2, "length")
    assert record.server is not None
    assert (record.server.prefill_worker, record.server.decode_worker) == ("p0", "d0")
    assert record.ttft_from_send_s is not None
    assert 0 < record.server.ttft_s <= record.ttft_from_send_s


async def test_j07_one_connection_carries_256_requests_at_once(tiny_model: Path) -> None:
    async with front_door(tiny_model, num_blocks=2_048, max_queued_requests=1_000) as door:
        door.shut("prefill")
        run = asyncio.create_task(run_on(door, planned(256, max_tokens=2)))
        await door.until_status(lambda status: status.num_in_flight + sum(q.num_requests for q in status.queues) >= 256)
        door.open_gates()
        result = await run
    assert {record.outcome for record in result.records} == {Outcome.COMPLETED}
    assert result.limits.peak_in_flight == 256


async def test_a_full_queue_rejects_and_a_hang_up_frees_all(tiny_model: Path) -> None:
    stop, rejections = asyncio.Event(), list[RequestError]()

    class Watched(PdserveClient):
        async def send(self, request: PlannedRequest, note: NoteTokens) -> Answer:
            try:
                return await super().send(request, note)
            except RequestError as error:
                rejections.append(error)
                if len(rejections) == 20:
                    stop.set()
                raise

    async with front_door(tiny_model, num_blocks=16, max_queued_requests=4) as door:
        door.shut("prefill")
        client = Watched(door.grpc_address)
        result = await run_plan(planned(40), client, RunOptions(drain_s=WAIT_S), "ours", stop=stop)
        await client.close()
        door.open_gates()
        await door.until_idle()
    assert all(error.rejected and "QUEUE_FULL" in str(error) for error in rejections)
    assert result.interrupted
    outcomes = Counter(record.outcome for record in result.records)
    assert outcomes[Outcome.REJECTED] >= 20
    assert outcomes[Outcome.UNFINISHED] == 40 - outcomes[Outcome.REJECTED]


async def test_a_planned_cancellation_reaches_the_server(tiny_model: Path) -> None:
    async with front_door(tiny_model) as door:
        door.shut("decode")
        result = await run_on(door, planned(1, max_tokens=200, cancel_after_tokens=1))
        status = await door.until_idle()
        assert dict(status.requests_by_outcome) == {"cancelled": 1}
    assert result.records[0].outcome is Outcome.CANCELLED
    assert result.records[0].num_output_tokens == 1


async def test_refusals_and_absence_are_errors_but_no_rejections(tiny_model: Path) -> None:
    async with front_door(tiny_model) as door:
        (record,) = (await run_on(door, planned(1, max_tokens=100_000))).records
    assert record.outcome is Outcome.FAILED
    assert record.error
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        client = PdserveClient(f"127.0.0.1:{own.getsockname()[1]}")
        with pytest.raises(RequestError, match="UNAVAILABLE") as caught:
            await client.send(planned(1).requests[0], lambda _: None)
        await client.close()
    assert not caught.value.rejected


async def test_each_tenant_sends_its_own_key(tiny_model: Path) -> None:
    async with front_door(tiny_model, api_keys={"secret-a": "a"}) as door:
        client = PdserveClient(door.grpc_address, api_keys={"a": "secret-a"})
        await client.send(PlannedRequest(0, 0.0, (5, 6), 2, tenant="a"), lambda _: None)
        with pytest.raises(RequestError, match="UNAUTHENTICATED"):
            await client.send(PlannedRequest(1, 0.0, (5, 6), 2, tenant="b"), lambda _: None)
        await client.close()
