"""The coordinator's connection to one worker: Reserve calls, and one long-lived Run stream per role.

Knows nothing of sequences beyond their messages; what outputs mean, and what a lost worker means, is told to `events`.
"""

import asyncio
import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import grpc

from coordinator.fleet.command_stream import CommandStream
from coordinator.fleet.values import Denied, Granted, Role, Target, WorkerInfo
from coordinator.fleet.worker import WorkerEvents
from coordinator.fleet.worker_messages import (
    context_to_proto,
    decode_submit_to_proto,
    output_from_proto,
    prefill_submit_to_proto,
    reserve_from_proto,
    reserve_to_proto,
)
from coordinator.sequences import SequenceRequest
from pdserve.client.channels import aio_channel
from pdserve.client.errors import error_from_rpc
from pdserve.client.wire import sequence_id_to_proto
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.v1 import worker_pb2, worker_pb2_grpc

DIAL_TIMEOUT_S = 5.0
RESERVE_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """`heartbeat_s`: how often each stream renews this coordinator's reservations."""

    coordinator_incarnation: int
    heartbeat_s: float


class WorkerClient:
    """Open from `start` until `close` or until `events.on_lost`."""

    def __init__(self, info: WorkerInfo, config: ConnectionConfig, events: WorkerEvents) -> None:
        self._info = info
        self._config = config
        self._events = events
        self._prefill: CommandStream[worker_pb2.PrefillCommand, worker_pb2.PrefillCommands] | None = None
        self._decode: CommandStream[worker_pb2.DecodeCommand, worker_pb2.DecodeCommands] | None = None
        self._channel = aio_channel(info.control_address)
        self._decode_stub: worker_pb2_grpc.DecodeAsyncStub = worker_pb2_grpc.DecodeStub(self._channel)
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Dial and open one stream per role.

        Raises:
            PdserveError: WORKER_LOST, if the worker's address does not answer.
        """
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await self._channel.channel_ready()
            self._open_streams()
            self._task = asyncio.create_task(self._run(), name=f"worker {self._info.key}")
        except TimeoutError:
            raise self._lost(f"no answer at {self._info.control_address}") from None
        finally:
            if self._task is None:
                await self._channel.close()

    def _open_streams(self) -> None:
        if Role.PREFILL in self._info.roles:
            stub: worker_pb2_grpc.PrefillAsyncStub = worker_pb2_grpc.PrefillStub(self._channel)
            beat = worker_pb2.PrefillCommand(heartbeat=worker_pb2.Heartbeat())
            self._prefill = CommandStream(stub.Run(), self._pack_prefill, beat, self._config.heartbeat_s)
        if Role.DECODE in self._info.roles:
            decode_beat = worker_pb2.DecodeCommand(heartbeat=worker_pb2.Heartbeat())
            call = self._decode_stub.Run()
            self._decode = CommandStream(call, self._pack_decode, decode_beat, self._config.heartbeat_s)

    def _pack_prefill(self, commands: Seq[worker_pb2.PrefillCommand]) -> worker_pb2.PrefillCommands:
        incarnation = self._config.coordinator_incarnation
        return worker_pb2.PrefillCommands(coordinator_incarnation=incarnation, commands=commands)

    def _pack_decode(self, commands: Seq[worker_pb2.DecodeCommand]) -> worker_pb2.DecodeCommands:
        incarnation = self._config.coordinator_incarnation
        return worker_pb2.DecodeCommands(coordinator_incarnation=incarnation, commands=commands)

    async def _run(self) -> None:
        tasks = [
            asyncio.create_task(work)
            for role, stream in ((Role.PREFILL, self._prefill), (Role.DECODE, self._decode))
            if stream is not None
            for work in (stream.write_all(), stream.read_all(partial(self._hand_on, role)))
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            error = self._why_ended(next(iter(done)))
        finally:
            self._closed = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._channel.close()
        self._events.on_lost(error)

    def _hand_on(self, role: Role, message: worker_pb2.WorkerOutputs) -> None:
        if message.worker_incarnation != self._info.key.incarnation:
            logger.warning(
                "worker %s: outputs of incarnation %016x ignored", self._info.key, message.worker_incarnation
            )
            return
        self._events.on_outputs(role, [output_from_proto(output) for output in message.outputs])

    def _why_ended(self, task: "asyncio.Task[None]") -> PdserveError:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return self._lost("it ended its stream")
        if isinstance(error, grpc.RpcError):
            return self._lost(error_from_rpc(error).message)
        if not isinstance(error, asyncio.InvalidStateError):  # which a write to an ended call raises
            logger.error("worker %s: its stream's handler failed", self._info.key, exc_info=error)
        return self._lost("its stream broke")

    def _lost(self, how: str) -> PdserveError:
        return PdserveError(ErrorReason.WORKER_LOST, f"worker {self._info.key.worker_id} was lost: {how}")

    async def reserve(self, sequence_id: SequenceId, request: SequenceRequest, remaining_s: float) -> Granted | Denied:
        """Ask for the blocks of the sequence's whole life.

        Raises:
            PdserveError: no answer, or one that refuses; the worker may hold a grant all the same.
        """
        if self._closed:
            raise self._lost("its connection is closed")
        message = reserve_to_proto(context_to_proto(sequence_id, request, remaining_s), request)
        call = self._decode_stub.Reserve(message, timeout=min(RESERVE_TIMEOUT_S, remaining_s))
        try:
            answer = await call
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Closing the channel cancels its calls, and grpc passes that on as if the caller were cancelled.
            raise self._lost("its connection was closed") from None
        return reserve_from_proto(answer)

    def submit_prefill(
        self, sequence_id: SequenceId, request: SequenceRequest, remaining_s: float, target: Target | None
    ) -> None:
        context = context_to_proto(sequence_id, request, remaining_s)
        self._send_prefill(worker_pb2.PrefillCommand(submit=prefill_submit_to_proto(context, request, target)))

    def submit_decode(
        self, sequence_id: SequenceId, request: SequenceRequest, remaining_s: float, reservation_id: int
    ) -> None:
        context = context_to_proto(sequence_id, request, remaining_s)
        self._send_decode(worker_pb2.DecodeCommand(submit=decode_submit_to_proto(context, request, reservation_id)))

    def cancel(self, role: Role, sequence_id: SequenceId) -> None:
        """Free whatever the worker holds for the sequence in `role`; harmless if that is nothing."""
        cancel = worker_pb2.Cancel(request_id=sequence_id_to_proto(sequence_id))
        if role is Role.PREFILL:
            self._send_prefill(worker_pb2.PrefillCommand(cancel=cancel))
        else:
            self._send_decode(worker_pb2.DecodeCommand(cancel=cancel))

    def _send_prefill(self, command: worker_pb2.PrefillCommand) -> None:
        if self._prefill is None:
            raise ValueError(f"worker {self._info.key} has no open prefill stream")
        self._prefill.send(command)

    def _send_decode(self, command: worker_pb2.DecodeCommand) -> None:
        if self._decode is None:
            raise ValueError(f"worker {self._info.key} has no open decode stream")
        self._decode.send(command)

    def close(self) -> None:
        """Drop the streams; `closed` waits for that."""
        if self._task is not None and not self._closed:
            self._task.cancel()
        self._closed = True

    async def closed(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])
