"""A whole coordinator in the test's process, HTTP and gRPC on real sockets, in front of one scripted worker a role."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from coordinator.main import CoordinatorProcess, load_models
from pdserve.client.channels import aio_channel
from pdserve.client.client import AsyncClient
from pdserve.client.inference import Delta, Finished, GenerateOptions
from pdserve.client.wire import model_info_to_proto
from pdserve.core.errors import PdserveError
from pdserve.serving.settings import CoordinatorSettings, ModelSettings, Settings
from pdserve.v1 import fleet_pb2, fleet_pb2_grpc
from tests.support.scripted_worker import DECODE, MODEL, PREFILL, ScriptedWorker

WAIT_S = 20.0
APIS = ("http", "sse", "grpc")
"""Three ways to ask for the same thing: an answer in one piece, server-sent events, a gRPC stream."""


@dataclass
class Answer:
    """What a client got. `error` is the typed reason, `status` that of HTTP; `done`: it ended as a good answer does.

    Over HTTP, which counts all choices together, their tokens are those of choice 0.
    """

    token_counts: dict[int, int] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    text: str = ""
    error: str | None = None
    status: int | None = None
    done: bool = False


@dataclass
class FrontDoor:
    """`ask` is what a client does; cancelling it hangs up."""

    http: httpx.AsyncClient
    client: AsyncClient
    fleet: "fleet_pb2_grpc.FleetAsyncStub"
    grpc_address: str
    workers: dict[str, ScriptedWorker]

    @property
    def prefill(self) -> ScriptedWorker:
        return self.workers["p0"]

    @property
    def decode(self) -> ScriptedWorker:
        return self.workers["d0"]

    def shut(self, gate: str) -> None:
        """Close the gate of that name at both workers."""
        for worker in self.workers.values():
            getattr(worker.script, gate).clear()

    def open_gates(self) -> None:
        for worker in self.workers.values():
            script = worker.script
            for gate in (script.reserve, script.prefill, script.transfer, script.decode, script.first_token):
                gate.set()

    async def status(self) -> fleet_pb2.FleetStatus:
        return await self.fleet.GetStatus(fleet_pb2.GetStatusRequest(), timeout=WAIT_S)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    async def until_status(self, condition: Callable[[fleet_pb2.FleetStatus], bool]) -> fleet_pb2.FleetStatus:
        async with asyncio.timeout(WAIT_S):
            while not condition(status := await self.status()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return status

    async def until_idle(self) -> fleet_pb2.FleetStatus:
        """Nothing is held at a worker, nothing is counted or queued here."""
        await self.until(lambda: all(worker.idle for worker in self.workers.values()))
        return await self.until_status(
            lambda status: (
                status.num_in_flight == 0
                and all(w.num_in_flight == 0 for pool in status.pools for w in pool.workers)
                and all(queue.num_requests == 0 for queue in status.queues)
            )
        )

    async def ask(self, api: str, prompt: object, deadline_s: float | None = None, **fields: Any) -> Answer:
        if api == "grpc":
            return await self._ask_grpc(prompt, deadline_s, **fields)
        body = {"model": MODEL.name, "prompt": prompt, "stream": api == "sse", **fields}
        if api == "sse":
            body["stream_options"] = {"include_usage": True}
        headers = {} if deadline_s is None else {"X-Request-Timeout": str(deadline_s)}
        response = await self.http.post("/v1/completions", json=body, headers=headers)
        streamed = api == "sse" and response.status_code == 200
        return read_answer(response.status_code, response.text.split("\n\n") if streamed else [response.text], streamed)

    async def _ask_grpc(self, prompt: Any, deadline_s: float | None, **fields: Any) -> Answer:
        answer = Answer()
        options = GenerateOptions(**fields, deadline_s=deadline_s)
        try:
            async with contextlib.aclosing(self.client.generate(prompt, options)) as events:  # type: ignore[type-var]
                async for event in events:
                    if isinstance(event, Delta):
                        answer.text += event.text
                    elif isinstance(event, Finished):
                        answer.finish_reasons[event.choice] = event.finish_reason.value
                        answer.token_counts[event.choice] = event.usage.completion_tokens
            answer.done = True
        except PdserveError as error:
            answer.error = error.reason.value
        return answer


def read_answer(status: int, events: list[str], streamed: bool) -> Answer:
    """An answer of /v1/completions from its one body or its server-sent events."""
    answer = Answer(status=status)
    for event in filter(None, events):
        text = event.removeprefix("data: ")
        assert not answer.done, "something follows the end"
        if text == "[DONE]":
            answer.done = True
            continue
        body = json.loads(text)
        if "error" in body:
            answer.error = body["error"]["code"]
            continue
        for choice in body["choices"]:
            answer.text += choice["text"]
            if choice["finish_reason"] is not None:
                answer.finish_reasons[choice["index"]] = choice["finish_reason"]
        if body.get("usage") is not None:
            answer.token_counts[0] = body["usage"]["completion_tokens"]
        answer.done = not streamed
    return answer


@asynccontextmanager
async def front_door(model: Path, num_blocks: int = 256, **settings: object) -> AsyncIterator[FrontDoor]:
    """`model`: whose tokenizer and limits to use. Closes everything at the end."""
    values = {"http_port": 0, "grpc_port": 0, "drain_s": 5.0, "stalled_after_s": 600.0, **settings}
    all_settings = Settings(
        model=ModelSettings(source=str(model), served_name=MODEL.name, dtype="float32"),
        coordinator=CoordinatorSettings.model_validate(values),
    )
    models = load_models(all_settings)
    registration = {"model": model_info_to_proto(models.get(MODEL.name).info)}
    process = CoordinatorProcess(all_settings, models)
    ready: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(process.serve(ready.set_result))
    ports = await asyncio.wait_for(ready, WAIT_S)
    address = f"127.0.0.1:{ports['grpc_port']}"
    limits = httpx.Limits(max_connections=None)
    workers: dict[str, ScriptedWorker] = {}
    try:
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports['http_port']}", timeout=60, limits=limits) as http,
            AsyncClient(address) as client,
            aio_channel(address) as channel,
        ):
            door = FrontDoor(http, client, fleet_pb2_grpc.FleetStub(channel), address, workers)
            for name, role in (("p0", PREFILL), ("d0", DECODE)):
                await ScriptedWorker(name, (role,), workers, num_blocks, registration).start(address)
            await door.until_status(lambda s: sum(w.state == "ready" for p in s.pools for w in p.workers) == 2)
            yield door
    finally:
        process.stop()
        process.stop()
        await asyncio.wait_for(task, WAIT_S)
        for worker in list(workers.values()):
            await worker.kill()
