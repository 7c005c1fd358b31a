"""H02: the server's latencies are those that clients see. The case's 3 s in the queue and 1 s of transfer are scaled to
0.6 s and 0.2 s, with the same tolerances; the slow run has the full ones."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.client.inference import Delta, Finished, GenerateOptions, Timings
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.serving.settings import CoordinatorSettings
from tests.support.front_door import FrontDoor, front_door
from tests.support.scripted_worker import EOS, MODEL

PROMPT = [5, 6, 7]
CLIENT_TOLERANCE_S = 0.05
PHASES_TOLERANCE_S = 0.01
PHASES = ("queue", "reserve", "prefill")
STREAMED = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@dataclass
class Heard:
    """What a client noted: readings of the monotonic clock when it asked and at each output token."""

    sent_s: float = 0.0
    tokens_s: list[float] = field(default_factory=list)
    timings: Timings | None = None
    first: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, num_tokens: int) -> None:
        self.tokens_s += [time.monotonic()] * num_tokens
        if self.tokens_s:
            self.first.set()

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.sent_s


async def listen(door: FrontDoor, api: str, heard: Heard, prompt: list[int] = PROMPT, **fields: Any) -> None:
    """Raises PdserveError where a gRPC call ends in one; over HTTP an error event just ends it."""
    heard.sent_s = time.monotonic()
    if api == "grpc":
        options = GenerateOptions(**fields)
        async with contextlib.aclosing(door.client.generate(prompt, options)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    heard.take(len(event.token_ids))
                elif isinstance(event, Finished):
                    heard.timings = event.timings
        return
    body = {"model": MODEL.name, "prompt": prompt, **STREAMED, **fields}
    async with door.http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if "usage" in line:
                usage = json.loads(line.removeprefix("data: "))["usage"]
                heard.take(usage["completion_tokens"] - len(heard.tokens_s))


@dataclass
class Lag:
    """How late this process's event loop was at worst: what a busy machine adds to any reading of the clock."""

    worst_s: float = 0.0


@asynccontextmanager
async def loop_lag() -> AsyncIterator[Lag]:
    lag = Lag()

    async def watch() -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(0.005)
            lag.worst_s = max(lag.worst_s, time.monotonic() - before_s - 0.005)

    task = asyncio.create_task(watch())
    try:
        yield lag
    finally:
        task.cancel()


async def scraped(door: FrontDoor) -> dict[str, float]:
    """Sums and counts of the model's histograms, without the prefix."""
    text = (await door.http.get("/metrics")).text
    return {
        sample.name.removeprefix("pdserve:"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.type == "histogram" and "le" not in sample.labels
    }


async def queued(door: FrontDoor, num_requests: int) -> None:
    await door.until_status(lambda status: sum(queue.num_requests for queue in status.queues) == num_requests)


SCALED = pytest.param(0.6, 0.2, id="scaled")
FULL = pytest.param(3.0, 1.0, id="full", marks=pytest.mark.slow)


@pytest.mark.parametrize("api", ["sse", "grpc"])
@pytest.mark.parametrize(("queue_s", "transfer_s"), [SCALED, FULL])
async def test_the_servers_ttft_is_the_clients(tiny_model: Path, api: str, queue_s: float, transfer_s: float) -> None:
    """Every phase is given a length; the one request that sends tokens is the histograms' only sample."""
    reserve_s = prefill_s = queue_s / 4
    async with front_door(tiny_model) as door, loop_lag() as lag:
        for gate in ("reserve", "prefill", "transfer"):
            door.shut(gate)
        ahead = asyncio.create_task(door.ask("grpc", PROMPT, max_tokens=2))
        await door.until(lambda: door.decode.num_asked == 1)  # it has its turn; who comes now, waits in the queue
        heard = Heard()
        asked = asyncio.create_task(listen(door, api, heard, max_tokens=2))
        await queued(door, 2)
        await asyncio.sleep(queue_s)
        ahead.cancel()
        await door.until(lambda: door.decode.num_asked == 2)
        await asyncio.sleep(reserve_s)
        door.decode.script.reserve.set()
        await door.until(lambda: len(door.prefill.submits) == 1)
        await asyncio.sleep(prefill_s)
        door.prefill.script.prefill.set()
        await asyncio.wait_for(heard.first.wait(), 20)
        await asyncio.sleep(transfer_s)
        door.prefill.script.transfer.set()
        await asked
        await door.until_idle()
        server = await scraped(door)

    assert server["time_to_first_token_seconds_count"] == 1
    ttft_s = server["time_to_first_token_seconds_sum"]
    # One clock for both: the server begins later than its client, and is done before it.
    assert 0 <= heard.ttft_s - ttft_s <= CLIENT_TOLERANCE_S + lag.worst_s
    phases = {name: server[f"request_{name}_time_seconds_sum"] for name in PHASES}
    assert sum(phases.values()) == pytest.approx(ttft_s, abs=PHASES_TOLERANCE_S)
    for name, least_s in zip(PHASES, (queue_s, reserve_s, prefill_s), strict=True):
        assert least_s <= phases[name] <= ttft_s - (queue_s + reserve_s + prefill_s - least_s)

    exposed_s, first_itl_s = server["exposed_transfer_seconds_sum"], server["inter_token_latency_seconds_sum"]
    assert (server["exposed_transfer_seconds_count"], server["inter_token_latency_seconds_count"]) == (1, 1)
    assert transfer_s <= exposed_s <= first_itl_s + PHASES_TOLERANCE_S + lag.worst_s
    assert abs(heard.tokens_s[1] - heard.tokens_s[0] - first_itl_s) <= CLIENT_TOLERANCE_S + lag.worst_s
    if heard.timings is not None:
        told = {name: getattr(heard.timings, f"{name}_s") for name in (*PHASES, "ttft", "exposed_transfer")}
        assert told == pytest.approx(phases | {"ttft": ttft_s, "exposed_transfer": exposed_s}, abs=1e-5)


async def test_ttft_counts_who_got_a_token(tiny_model: Path) -> None:
    """Whole answers, a first token that ends it, a cancel, a failure and a deadline after it; and five without any."""
    async with front_door(tiny_model) as door:
        clients = [Heard() for _ in range(10)]
        for heard in clients[:2]:
            await listen(door, "sse", heard, max_tokens=3)
        await listen(door, "grpc", clients[2], max_tokens=1)
        await listen(door, "grpc", clients[3], [EOS, 5], max_tokens=3)

        door.shut("decode")
        cancelled = asyncio.create_task(listen(door, "sse", clients[4], max_tokens=3))
        await clients[4].first.wait()
        cancelled.cancel()
        await door.until_idle()
        door.open_gates()
        door.decode.script.decode_errors.append(PdserveError(ErrorReason.NUMERICAL_ERROR, "as scripted"))
        with pytest.raises(PdserveError, match="as scripted"):
            await listen(door, "grpc", clients[5], max_tokens=3)

        door.prefill.script.prefill_errors.append(PdserveError(ErrorReason.NUMERICAL_ERROR, "as scripted"))
        await listen(door, "sse", clients[6], max_tokens=3)
        await listen(door, "sse", clients[7], max_tokens=3, temperature=-1)
        door.shut("prefill")
        with pytest.raises(PdserveError, match="deadline"):
            await listen(door, "grpc", clients[8], max_tokens=3, deadline_s=0.2)
        abandoned = asyncio.create_task(listen(door, "sse", clients[9], max_tokens=3))
        await door.until(lambda: len(door.prefill.prefilling) == 1)
        abandoned.cancel()
        await door.until_idle()
        server = await scraped(door)
    got_one = [bool(heard.tokens_s) for heard in clients]
    assert got_one == [True] * 6 + [False] * 4
    for name in ("time_to_first_token", "request_queue_time", "request_reserve_time", "request_prefill_time"):
        assert server[f"{name}_seconds_count"] == sum(got_one), name


async def test_arrival_is_stamped_before_the_body_and_no_wall_clock_matters(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body's second half comes 0.3 s after the first, while the wall clock is set back an hour."""
    wall_s, waited_s = time.time, 0.3
    text = json.dumps({"model": MODEL.name, "prompt": PROMPT, "max_tokens": 3}).encode()

    def set_back() -> float:
        """For the coordinator's own code: gRPC compares it with a clock that is not patched."""
        ours = sys._getframe(1).f_globals["__name__"].startswith("coordinator.")
        return wall_s() - (3600 if ours else 0)

    async def body() -> AsyncIterator[bytes]:
        yield text[:10]
        await asyncio.sleep(waited_s)
        monkeypatch.setattr(time, "time", set_back)
        yield text[10:]

    async with front_door(tiny_model) as door, loop_lag() as lag:
        began_s = time.monotonic()
        answer = await door.http.post("/v1/completions", content=body())
        took_s = time.monotonic() - began_s
        await door.until_idle()
        server = await scraped(door)
    assert answer.status_code == 200
    assert answer.json()["created"] < wall_s() - 3000, "the wall clock was not set back"
    # What the body waited for is time in the queue, but for the moment its head took to arrive.
    assert waited_s - CLIENT_TOLERANCE_S - lag.worst_s <= server["request_queue_time_seconds_sum"] <= took_s
    assert server["request_queue_time_seconds_sum"] <= server["time_to_first_token_seconds_sum"] <= took_s
    assert server["time_to_first_token_seconds_sum"] <= server["e2e_request_latency_seconds_sum"] <= took_s


@pytest.mark.parametrize("max_deadline_s", [None, 90.0, 7200.0])
async def test_buckets_tell_short_and_long_ones_apart(tiny_model: Path, max_deadline_s: float | None) -> None:
    """As exported: from 5 ms or less between tokens up to the longest deadline that a request may have."""
    changes: dict[str, Any] = (
        {} if max_deadline_s is None else {"max_deadline_s": max_deadline_s, "default_deadline_s": 60.0}
    )
    longest_s = CoordinatorSettings.model_validate(changes).max_deadline_s
    async with front_door(tiny_model, **changes) as door:
        await listen(door, "sse", Heard(), max_tokens=3)
        text = (await door.http.get("/metrics")).text
    bounds: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bounds.setdefault(family.name, []).append(float(sample.labels["le"]))
    assert len(bounds) == 8
    for name, of_family in bounds.items():
        *finite, last = sorted(of_family)
        assert (finite[-1] >= longest_s, last) == (True, float("inf")), name
        assert finite[0] <= 0.005, name
