"""A real scheduling half with its Fleet service on a loopback port, and scripted workers registered there."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import pytest

from coordinator.fleet.values import Role, WorkerState
from coordinator.scheduling.assembly import Scheduling, build_scheduling
from coordinator.sequences import SequenceEnd, SequenceRequest, SequenceStream, TokenDelta
from pdserve.client.channels import aio_server, bind
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import new_incarnation
from pdserve.core.model_info import ModelInfo
from pdserve.core.sampling import SamplingParams
from pdserve.serving.settings import CoordinatorSettings
from pdserve.v1 import fleet_pb2_grpc
from tests.support.scripted_worker import DECODE, MODEL, PREFILL, ScriptedWorker

WAIT_S = 20.0


class Rig:
    def __init__(self, scheduling: Scheduling, address: str) -> None:
        self.scheduling = scheduling
        self.address = address
        self.dispatcher = scheduling.dispatcher
        self.fleet = scheduling.fleet
        self.workers: dict[str, ScriptedWorker] = {}

    async def add(
        self, name: str, roles: str, num_blocks: int = 256, overrides: Mapping[str, object] | None = None
    ) -> ScriptedWorker:
        """Start a worker ("prefill", "decode" or "colocated") and wait until it is ready."""
        both = {"prefill": (PREFILL,), "decode": (DECODE,), "colocated": (PREFILL, DECODE)}
        worker = ScriptedWorker(name, both[roles], self.workers, num_blocks, overrides)
        await worker.start(self.address)
        await self.until(lambda: self.state(worker) is WorkerState.READY)
        return worker

    def state(self, worker: ScriptedWorker) -> WorkerState | None:
        found = [w for w in self.fleet.workers() if w.info.key.worker_id == worker.name]
        return self.fleet.state(found[0]) if found else None

    def in_flight(self) -> dict[tuple[str, Role], int]:
        return {
            (worker.info.key.worker_id, role): worker.num_in_flight(role)
            for worker in self.fleet.workers()
            for role in worker.info.roles
        }

    def submit(
        self,
        prompt: tuple[int, ...] = (5, 6, 7),
        max_tokens: int = 4,
        deadline_s: float = 60.0,
        model: ModelInfo = MODEL,
    ) -> SequenceStream:
        return self.dispatcher.submit([request(prompt, max_tokens, deadline_s, model)])[0]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that no event tells of; fails after a while."""
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    async def until_idle(self) -> None:
        """Nothing in flight here, nothing held at any worker."""
        await self.until(
            lambda: (
                self.dispatcher.num_in_flight == 0
                and all(worker.idle for worker in self.workers.values())
                and not any(self.in_flight().values())
            )
        )


def request(
    prompt: tuple[int, ...] = (5, 6, 7), max_tokens: int = 4, deadline_s: float = 60.0, model: ModelInfo = MODEL
) -> SequenceRequest:
    now_s = time.monotonic()
    sampling = SamplingParams(max_tokens=max_tokens)
    return SequenceRequest(model.name, prompt, sampling, arrival_s=now_s, deadline_s=now_s + deadline_s, label="same")


async def read_all(stream: SequenceStream, first_index: int = 0) -> tuple[list[int], SequenceEnd]:
    """Every token from `first_index` on, checked to come in order and once, and the end."""
    tokens: list[int] = []
    end: SequenceEnd | None = None
    async with asyncio.timeout(WAIT_S):
        async for event in stream:
            assert end is None
            if isinstance(event, TokenDelta):
                assert event.first_index == first_index + len(tokens)
                tokens.extend(event.token_ids)
            else:
                end = event
    assert end is not None
    return tokens, end


@asynccontextmanager
async def scheduling_rig(models: tuple[ModelInfo, ...] = (MODEL,), **settings: object) -> AsyncIterator[Rig]:
    """Closes what is left, workers too."""
    values = {"heartbeat_s": 0.5, "stalled_after_s": 60.0, **settings}
    scheduling = build_scheduling(
        {model.name: model for model in models},
        CoordinatorSettings.model_validate(values),
        ("local", "grpc"),
        new_incarnation(),
    )
    server = aio_server()
    fleet_pb2_grpc.add_FleetServicer_to_server(scheduling.fleet_service, server)
    port = bind(server.add_insecure_port, "127.0.0.1", 0)
    await server.start()
    rig = Rig(scheduling, f"127.0.0.1:{port}")
    try:
        yield rig
    finally:
        await scheduling.close()
        for worker in list(rig.workers.values()):
            await worker.kill()
        await server.stop(None)


async def pair(rig: Rig, num_blocks: int = 256) -> tuple[ScriptedWorker, ScriptedWorker]:
    return await rig.add("p0", "prefill", num_blocks), await rig.add("d0", "decode", num_blocks)


async def first_delta(stream: SequenceStream) -> TokenDelta:
    event = await anext(aiter(stream))
    assert isinstance(event, TokenDelta)
    return event


async def failure(stream: SequenceStream) -> ErrorReason:
    with pytest.raises(PdserveError) as caught:
        await read_all(stream)
    return caught.value.reason
