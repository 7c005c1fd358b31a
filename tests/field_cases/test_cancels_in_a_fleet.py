"""D01, D03 and H01 in fleets of real processes: what clients abandon is given back, and shows as given back at once."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.client.inference import Delta, GenerateOptions
from tests.support.fleet import Fleet, live_workers, run_fleet

LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}


async def read_for_ever(fleet: Fleet, api: str, prompt: list[int], started: asyncio.Event, **options: Any) -> None:
    """Stream over gRPC or HTTP; `started` is set with the first token."""
    if api == "grpc":
        async for event in fleet.client.generate(prompt, GenerateOptions(**options)):
            if isinstance(event, Delta):
                started.set()
        return
    body = {"prompt": prompt, "stream": api == "sse", **options}
    async with (
        httpx.AsyncClient(base_url=fleet.http_url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        async for _ in response.aiter_lines():
            started.set()


@pytest.mark.parametrize("api", ["http", "sse", "grpc"])
async def test_three_choices_abandoned_in_each_phase(tiny_model: Path, api: str) -> None:
    """D01 with n = 3: while decoding, between prefill chunks, and in the queue."""
    async with run_fleet(tiny_model, worker={"num_blocks": 500}, prefill={"token_budget": 4}) as fleet:
        for phase, prompt in (("decode", [7] * 20), ("prefill", [7] * 1000), ("queued", [7] * 20)):
            before = totals(await fleet.status())
            started = asyncio.Event()
            holder: asyncio.Task[None] | None = None
            if phase == "queued":
                holder = asyncio.create_task(
                    read_for_ever(fleet, "grpc", [8] * 3000, started, max_tokens=1000, ignore_eos=True)
                )
                await fleet.until(lambda s: s.num_in_flight == 1)
            call = asyncio.create_task(read_for_ever(fleet, api, prompt, asyncio.Event(), n=3, **LONG))
            await fleet.until(lambda s, phase=phase, before=before: in_phase(s, phase, before))  # type: ignore[misc]
            await hang_up(call)
            if holder is not None:
                await fleet.until(lambda s: s.num_in_flight == 1 and all(q.num_requests == 0 for q in s.queues))
                await hang_up(holder)
            status = await fleet.until_idle()
            after = totals(status)
            assert after["cancelled"] - before["cancelled"] == (1 if holder is None else 2)
            assert after["decode"] - before["decode"] < 3 * 1499
            assert phase != "prefill" or after["prefill"] - before["prefill"] < 3 * 1000


def totals(status: Any) -> dict[str, int]:
    loads = [worker.load.totals for worker in live_workers(status).values()]
    return {
        "cancelled": status.requests_by_outcome["cancelled"],
        "prefill": sum(load.prefill_tokens for load in loads),
        "decode": sum(load.decode_tokens for load in loads),
    }


def in_phase(status: Any, phase: str, before: dict[str, int]) -> bool:
    if phase == "queued":
        return any(queue.num_requests > 0 for queue in status.queues) and status.num_in_flight == 4
    return totals(status)[phase] > before[phase]


async def hang_up(call: "asyncio.Task[None]") -> None:
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def gauges(fleet: Fleet) -> dict[str, float]:
    """Every sample of the next scrape."""
    async with httpx.AsyncClient(base_url=fleet.http_url) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def busy(found: dict[str, float]) -> dict[str, float]:
    """Everything that says that something is going on."""
    names = ("num_requests_", "worker_requests_", "worker_in_flight", "kv_cache_usage_perc", "kv_blocks_reserved")
    return {name: value for name, value in found.items() if value != 0 and any(part in name for part in names)}


def fill(fleet: Fleet, num_requests: int) -> list["asyncio.Task[None]"]:
    """Requests of 100 blocks each."""
    options = {"max_tokens": 1590, "ignore_eos": True}
    return [
        asyncio.create_task(read_for_ever(fleet, "grpc", [7] * 10, asyncio.Event(), **options))
        for _ in range(num_requests)
    ]


async def cancel_all(calls: list["asyncio.Task[None]"]) -> None:
    for call in calls:
        call.cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)


async def test_50_running_and_20_waiting_cancelled_at_once_show_as_nothing(tiny_model: Path) -> None:
    """H01: no traffic follows, and yet the scrape is clean and the whole pool can be reserved again."""
    async with run_fleet(tiny_model, worker={"num_blocks": 5000, "max_batch_size": 64}) as fleet:
        calls = fill(fleet, 70)
        await fleet.until(lambda s: num_reserved(s) == 5000 and any(q.num_requests >= 19 for q in s.queues))
        assert busy(await gauges(fleet))
        await cancel_all(calls)
        async with asyncio.timeout(20):
            while busy(await gauges(fleet)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        found = await gauges(fleet)
        labels = '{model="tiny",role="decode",worker="decode-0"}'
        assert found[f"pdserve:kv_blocks_free{labels}"] + found[f"pdserve:kv_blocks_cached{labels}"] == 5000
        status = await fleet.status()
        assert all(worker.num_in_flight == 0 for worker in live_workers(status).values())
        again = fill(fleet, 50)
        await fleet.until(lambda s: num_reserved(s) == 5000)
        await cancel_all(again)


def num_reserved(status: Any) -> int:
    return int(live_workers(status)["decode-0"].load.num_reserved_blocks)
