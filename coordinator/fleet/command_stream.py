"""One Run stream to a worker: commands go out batched and in order, heartbeats in between, outputs come in."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Generic, TypeVar

import grpc.aio
from google.protobuf.message import Message

from pdserve.v1 import worker_pb2

MAX_BATCH_BYTES = 1024 * 1024

Command = TypeVar("Command", bound=Message)
Batch = TypeVar("Batch", bound=Message)


class CommandStream(Generic[Command, Batch]):
    """One Run stream: commands queued since the last write leave in one message; outputs are handed on as they come."""

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[Batch, worker_pb2.WorkerOutputs]",
        pack: Callable[[Seq[Command]], Batch],
        heartbeat: Command,
        heartbeat_s: float,
    ) -> None:
        self._call = call
        self._pack = pack
        self._heartbeat = heartbeat
        self._heartbeat_s = heartbeat_s
        self._queued: deque[Command] = deque()
        self._wake = asyncio.Event()

    def send(self, command: Command) -> None:
        self._queued.append(command)
        self._wake.set()

    async def write_all(self) -> None:
        """Write until the stream breaks. The first message, a heartbeat, opens the stream at the worker."""
        next_heartbeat_s = time.monotonic()
        while True:
            if time.monotonic() >= next_heartbeat_s:
                next_heartbeat_s = time.monotonic() + self._heartbeat_s
                self._queued.append(self._heartbeat)
            while self._queued:
                await self._call.write(self._pack(self._take()))
            self._wake.clear()
            try:
                async with asyncio.timeout(max(0.0, next_heartbeat_s - time.monotonic())):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _take(self) -> list[Command]:
        commands: list[Command] = []
        num_bytes = 0
        while self._queued and num_bytes < MAX_BATCH_BYTES:
            commands.append(self._queued.popleft())
            num_bytes += commands[-1].ByteSize()
        return commands

    async def read_all(self, on_message: Callable[[worker_pb2.WorkerOutputs], None]) -> None:
        """Read until the worker ends the stream."""
        while isinstance(message := await self._call.read(), worker_pb2.WorkerOutputs):
            on_message(message)
