"""A worker with real RPCs and no model: tokens come from a formula, KV transfers are calls between scripted workers.

Gates (set: open) stop it at a phase; failures can be queued; everything that it holds and was told is there to look at.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pdserve.client.channels import aio_channel, aio_server, bind
from pdserve.client.wire import (
    PROTOCOL_VERSION,
    error_to_proto,
    finish_reason_to_proto,
    kv_layout_to_proto,
    model_info_to_proto,
    sampling_from_proto,
    sequence_id_from_proto,
    sequence_id_to_proto,
)
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId, new_incarnation
from pdserve.core.model_info import KvLayout, ModelInfo
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import finish_reason_after
from pdserve.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc, worker_pb2, worker_pb2_grpc

PREFILL, DECODE = fleet_pb2.ROLE_PREFILL, fleet_pb2.ROLE_DECODE
EOS = 2
BLOCK_SIZE = 4
MODEL = ModelInfo("tiny", "fp-1", "TinyForTests", "float32", 300, 4096, (EOS,))
LAYOUT = KvLayout("float32", BLOCK_SIZE, num_layers=1, num_kv_heads=1, head_dim=2)


def scripted_token(prompt: tuple[int, ...], index: int) -> int:
    """Output token `index`: a prompt that begins with EOS gives EOS at once, others never do."""
    return EOS if prompt[0] == EOS else 100 + (sum(prompt) * 31 + index * 7) % 190


def expected_tokens(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return [scripted_token(prompt, index) for index in range(1 if prompt[0] == EOS else max_tokens)]


def scripted_logprobs(
    sampling: common_pb2.SamplingParams, name: Literal["num_logprobs", "num_prompt_logprobs"], num_tokens: int
) -> list[common_pb2.TokenLogprobs]:
    """Of `num_tokens` tokens, if asked for: as many top ones as asked for, all alike."""
    if not sampling.HasField(name):
        return []
    top = [common_pb2.TokenLogprob(token_id=100 + i, logprob=-2.0) for i in range(getattr(sampling, name))]
    return [common_pb2.TokenLogprobs(logprob=-1.0, top=top) for _ in range(num_tokens)]


@dataclass
class Script:
    """How a worker behaves; may be changed at any time. `gate(name)` blocks until that gate is open.

    `num_cached_tokens`: what the next prefills say they found; 0 when none is left.
    """

    prefill: asyncio.Event = field(default_factory=asyncio.Event)
    transfer: asyncio.Event = field(default_factory=asyncio.Event)
    decode: asyncio.Event = field(default_factory=asyncio.Event)
    reserve: asyncio.Event = field(default_factory=asyncio.Event)
    first_token: asyncio.Event = field(default_factory=asyncio.Event)
    prefill_errors: deque[PdserveError] = field(default_factory=deque)
    decode_errors: deque[PdserveError] = field(default_factory=deque)
    num_cached_tokens: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        for gate in (self.prefill, self.transfer, self.decode, self.reserve, self.first_token):
            gate.set()


@dataclass(frozen=True)
class Reservation:
    sequence_id: SequenceId
    reservation_id: int
    num_blocks: int


class ScriptedWorker:
    def __init__(
        self,
        name: str,
        roles: tuple["fleet_pb2.Role.ValueType", ...],
        peers: dict[str, "ScriptedWorker"],
        num_blocks: int = 256,
        overrides: Mapping[str, object] | None = None,
    ) -> None:
        self.name = name
        self.incarnation = new_incarnation()
        self.roles = roles
        self.script = Script()
        self.num_blocks = num_blocks
        self.reservations: dict[SequenceId, Reservation] = {}
        self.prefilling: dict[SequenceId, asyncio.Task[None]] = {}
        self.decoding: dict[SequenceId, asyncio.Task[None]] = {}
        self.expected: dict[SequenceId, worker_pb2.DecodeSubmit] = {}
        self.committed: dict[SequenceId, float] = {}
        self.submits: list[tuple[str, SequenceId]] = []
        self.contexts: list[worker_pb2.RequestContext] = []
        self.reserves: list[worker_pb2.ReserveRequest] = []
        self.totals = fleet_pb2.WorkerTotals()
        self.cancels: list[SequenceId] = []
        self.num_heartbeats = 0
        self.num_sent = 0
        self.num_asked = 0
        self.num_prefill_tokens = 0
        self.step_count = 0
        self.has_work = False
        self.draining = False
        self.max_reserved = 0
        self.decode_began = asyncio.Event()
        self._ledger_version = 1
        self._next_reservation = 1
        self._peers = peers
        self._overrides = dict(overrides or {})
        self._outputs: dict[int, asyncio.Queue[worker_pb2.SequenceOutput | None]] = {}
        self._reports: asyncio.Queue[fleet_pb2.LoadReport | None] = asyncio.Queue()
        self._server = aio_server()
        self._channel = aio_channel("127.0.0.1:1")
        self._report_task: asyncio.Task[None] | None = None
        peers[name] = self

    # --- membership ---------------------------------------------------------------------------------------------------

    async def start(self, coordinator_address: str) -> None:
        """Serve, register, and begin to report."""
        if PREFILL in self.roles:
            worker_pb2_grpc.add_PrefillServicer_to_server(_PrefillRpc(self), self._server)
        if DECODE in self.roles:
            worker_pb2_grpc.add_DecodeServicer_to_server(_DecodeRpc(self), self._server)
        self.port = bind(self._server.add_insecure_port, "127.0.0.1", 0)
        await self._server.start()
        await self._channel.close()
        self._channel = aio_channel(coordinator_address)
        await self.register()

    def registration(self) -> fleet_pb2.RegisterRequest:
        request = fleet_pb2.RegisterRequest(
            protocol_version=PROTOCOL_VERSION,
            worker=fleet_pb2.WorkerId(worker_id=self.name, incarnation=self.incarnation),
            roles=self.roles,
            model_name=MODEL.name,
            model=model_info_to_proto(MODEL),
            kv_layouts=[kv_layout_to_proto(LAYOUT)],
            transports=["local"] if len(self.roles) == 2 else ["grpc"],
            control_address=f"127.0.0.1:{self.port}",
            kv_address="127.0.0.1:9" if DECODE in self.roles else "",
            host="here",
            capacity=fleet_pb2.Capacity(num_blocks=self.num_blocks, block_size=BLOCK_SIZE),
        )
        for name in self._overrides:
            request.ClearField(name)  # type: ignore[arg-type]
        request.MergeFrom(fleet_pb2.RegisterRequest(**self._overrides))  # type: ignore[arg-type]
        return request

    async def register(self) -> None:
        stub: fleet_pb2_grpc.FleetAsyncStub = fleet_pb2_grpc.FleetStub(self._channel)
        await stub.Register(self.registration())
        self._reports = asyncio.Queue()
        self.report()
        self._report_task = asyncio.create_task(self._report_load(stub, self._reports))

    async def drain(self) -> None:
        stub: fleet_pb2_grpc.FleetAsyncStub = fleet_pb2_grpc.FleetStub(self._channel)
        await stub.Drain(fleet_pb2.DrainRequest(worker=self.registration().worker))

    @staticmethod
    async def _report_load(
        stub: "fleet_pb2_grpc.FleetAsyncStub", reports: "asyncio.Queue[fleet_pb2.LoadReport | None]"
    ) -> None:
        call = stub.ReportLoad()
        while (report := await reports.get()) is not None:
            await call.write(report)
        await call.done_writing()
        await call

    def report(self) -> None:
        self._reports.put_nowait(
            fleet_pb2.LoadReport(
                worker=self.registration().worker,
                ledger_version=self._ledger_version,
                step_count=self.step_count,
                has_work=self.has_work,
                draining=self.draining,
                num_usable_blocks=self.num_blocks,
                num_reserved_blocks=self.num_reserved,
                num_free_blocks=self.num_blocks - self.num_reserved,
                num_running=len(self.decoding),
                totals=self.totals,
            )
        )

    async def leave(self) -> None:
        """End the report stream as a worker does that has nothing left."""
        self._reports.put_nowait(None)
        if self._report_task is not None:
            await self._report_task
        await self.kill()

    async def kill(self) -> None:
        """Be gone at once, streams and all."""
        if self._report_task is not None:
            self._report_task.cancel()
            await asyncio.gather(self._report_task, return_exceptions=True)
        for task in [*self.prefilling.values(), *self.decoding.values()]:
            task.cancel()
        await self._channel.close()
        await self._server.stop(None)
        self._peers.pop(self.name, None)

    @property
    def num_reserved(self) -> int:
        return sum(reservation.num_blocks for reservation in self.reservations.values())

    @property
    def idle(self) -> bool:
        return not (self.reservations or self.prefilling or self.decoding or self.expected)

    # --- streams ------------------------------------------------------------------------------------------------------

    def emit(self, role: int, sequence_id: SequenceId, **fields: object) -> None:
        """Send one output, of a sequence that may be known or not."""
        output = worker_pb2.SequenceOutput(request_id=sequence_id_to_proto(sequence_id), **fields)  # type: ignore[arg-type]
        if role in self._outputs:
            self._outputs[role].put_nowait(output)

    def fail(self, role: int, sequence_id: SequenceId, error: PdserveError) -> None:
        self.emit(role, sequence_id, finish_reason=common_pb2.FINISH_REASON_ERROR, error=error_to_proto(error))

    async def run(self, role: int, commands: AsyncIterator[object]) -> AsyncIterator[worker_pb2.WorkerOutputs]:
        queue: asyncio.Queue[worker_pb2.SequenceOutput | None] = asyncio.Queue()
        self._outputs[role] = queue
        reader = asyncio.create_task(self._read(commands, queue))
        try:
            while (output := await queue.get()) is not None:
                outputs = [output]
                while not queue.empty() and (more := queue.get_nowait()) is not None:
                    outputs.append(more)
                yield worker_pb2.WorkerOutputs(worker_incarnation=self.incarnation, outputs=outputs)
                self.num_sent += len(outputs)
        finally:
            reader.cancel()

    async def _read(
        self, commands: AsyncIterator[object], queue: "asyncio.Queue[worker_pb2.SequenceOutput | None]"
    ) -> None:
        async for message in commands:
            for command in message.commands:  # type: ignore[attr-defined]
                self._handle(command)
        queue.put_nowait(None)

    def _handle(self, command: worker_pb2.PrefillCommand | worker_pb2.DecodeCommand) -> None:
        if command.HasField("heartbeat"):
            self.num_heartbeats += 1
        elif command.HasField("cancel"):
            self.cancel(
                sequence_id_from_proto(command.cancel.request_id), isinstance(command, worker_pb2.DecodeCommand)
            )
        elif isinstance(command, worker_pb2.PrefillCommand):
            self._submit_prefill(command.submit)
        else:
            self._submit_decode(command.submit)

    def cancel(self, sequence_id: SequenceId, decode: bool) -> None:
        self.cancels.append(sequence_id)
        tasks = self.decoding if decode else self.prefilling
        task = tasks.pop(sequence_id, None)
        if task is not None:
            task.cancel()
        if decode:
            self._release(sequence_id)

    # --- prefill ------------------------------------------------------------------------------------------------------

    def _submit_prefill(self, submit: worker_pb2.PrefillSubmit) -> None:
        sequence_id = sequence_id_from_proto(submit.context.request_id)
        self.submits.append(("prefill", sequence_id))
        self.contexts.append(submit.context)
        self.prefilling[sequence_id] = asyncio.create_task(self._prefill(sequence_id, submit))

    async def _prefill(self, sequence_id: SequenceId, submit: worker_pb2.PrefillSubmit) -> None:
        await self.script.prefill.wait()
        if self.script.prefill_errors:
            self.prefilling.pop(sequence_id, None)
            self.fail(PREFILL, sequence_id, self.script.prefill_errors.popleft())
            return
        self.num_prefill_tokens += len(submit.token_ids)
        token = scripted_token(tuple(submit.token_ids), 0)
        finish = finish_reason_after(token, 1, sampling_from_proto(submit.sampling), frozenset({EOS}))
        first = {"token_ids": [token], "finish_reason": finish_reason_to_proto(finish)}
        first["logprobs"] = scripted_logprobs(submit.sampling, "num_logprobs", 1)
        first["prompt_logprobs"] = scripted_logprobs(submit.sampling, "num_prompt_logprobs", len(submit.token_ids) - 1)
        if self.script.num_cached_tokens:
            first["num_cached_tokens"] = self.script.num_cached_tokens.popleft()
        ended_s = time.monotonic()
        if self.script.first_token.is_set():
            self.emit(PREFILL, sequence_id, **first)
        if finish is None and submit.HasField("target"):
            await self.script.transfer.wait()
            self._hand_over(sequence_id, submit, ended_s)
        if not self.script.first_token.is_set():
            await self.script.first_token.wait()
            self.emit(PREFILL, sequence_id, **first)
        self.prefilling.pop(sequence_id, None)

    def _hand_over(self, sequence_id: SequenceId, submit: worker_pb2.PrefillSubmit, ended_s: float) -> None:
        peer = self._peers.get(submit.target.worker.worker_id)
        if peer is not None and peer.commit(sequence_id, submit.target.reservation_id, ended_s):
            self.emit(PREFILL, sequence_id, first_index=1, transferred=True)
        else:
            self.fail(PREFILL, sequence_id, PdserveError(ErrorReason.TRANSFER_FAILED, "no such reservation"))

    # --- decode -------------------------------------------------------------------------------------------------------

    async def reserve(self, request: worker_pb2.ReserveRequest) -> worker_pb2.ReserveResponse:
        self.num_asked += 1
        self.reserves.append(request)
        await self.script.reserve.wait()
        needed, free = blocks_for_tokens(request.num_tokens_max, BLOCK_SIZE), self.num_blocks - self.num_reserved
        if needed > free:
            denied = worker_pb2.ReserveResponse.Denied(
                needed=needed, free=free, ledger_version=self._ledger_version, never_fits=needed > self.num_blocks
            )
            return worker_pb2.ReserveResponse(denied=denied)
        sequence_id = sequence_id_from_proto(request.context.request_id)
        reservation = Reservation(sequence_id, self._next_reservation, needed)
        self._next_reservation += 1
        self.reservations[sequence_id] = reservation
        self.max_reserved = max(self.max_reserved, self.num_reserved)
        granted = worker_pb2.ReserveResponse.Granted(
            reservation_id=reservation.reservation_id, num_blocks=needed, lease_ms=10_000
        )
        return worker_pb2.ReserveResponse(granted=granted)

    def _release(self, sequence_id: SequenceId) -> None:
        self.expected.pop(sequence_id, None)
        self.committed.pop(sequence_id, None)
        if self.reservations.pop(sequence_id, None) is not None:
            self._ledger_version += 1
            self.report()

    def _submit_decode(self, submit: worker_pb2.DecodeSubmit) -> None:
        sequence_id = sequence_id_from_proto(submit.context.request_id)
        self.submits.append(("decode", sequence_id))
        self.contexts.append(submit.context)
        reservation = self.reservations.get(sequence_id)
        if reservation is None or reservation.reservation_id != submit.reservation_id:
            self.fail(DECODE, sequence_id, PdserveError(ErrorReason.STALE, "there is no such reservation"))
            return
        self.expected[sequence_id] = submit
        self._join(sequence_id)

    def commit(self, sequence_id: SequenceId, reservation_id: int, prefill_ended_s: float) -> bool:
        reservation = self.reservations.get(sequence_id)
        if reservation is None or reservation.reservation_id != reservation_id:
            return False
        self.committed[sequence_id] = prefill_ended_s
        self._join(sequence_id)
        return True

    def _join(self, sequence_id: SequenceId) -> None:
        if sequence_id in self.expected and sequence_id in self.committed:
            submit = self.expected.pop(sequence_id)
            exposed_us = round(1e6 * (time.monotonic() - self.committed[sequence_id]))
            durations = common_pb2.PhaseDurations(exposed_transfer_us=exposed_us)
            self.decoding[sequence_id] = asyncio.create_task(self._decode(sequence_id, submit, durations))

    async def _decode(
        self, sequence_id: SequenceId, submit: worker_pb2.DecodeSubmit, durations: common_pb2.PhaseDurations
    ) -> None:
        self.decode_began.set()
        sampling, finish, index = sampling_from_proto(submit.sampling), None, 0
        prompt = tuple(submit.token_ids[: submit.num_prompt_tokens])
        while finish is None:
            await self.script.decode.wait()
            await asyncio.sleep(0)
            if self.script.decode_errors:
                self.fail(DECODE, sequence_id, self.script.decode_errors.popleft())
                break
            index += 1
            token = scripted_token(prompt, index)
            finish = finish_reason_after(token, index + 1, sampling, frozenset({EOS}))
            if finish is not None:
                self.decoding.pop(sequence_id, None)
                self._release(sequence_id)
            reason, logprobs = finish_reason_to_proto(finish), scripted_logprobs(submit.sampling, "num_logprobs", 1)
            output = {"first_index": index, "token_ids": [token], "finish_reason": reason, "logprobs": logprobs}
            self.emit(DECODE, sequence_id, durations=durations, **output)
        self.decoding.pop(sequence_id, None)
        self._release(sequence_id)


class _PrefillRpc(worker_pb2_grpc.PrefillServicer):
    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker

    async def Run(self, request_iterator, context):  # type: ignore[no-untyped-def]
        async for outputs in self._worker.run(PREFILL, request_iterator):
            yield outputs


class _DecodeRpc(worker_pb2_grpc.DecodeServicer):
    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker

    async def Reserve(self, request, context):  # type: ignore[no-untyped-def]
        return await self._worker.reserve(request)

    async def Release(self, request, context):  # type: ignore[no-untyped-def]
        self._worker.cancel(sequence_id_from_proto(request.request_id), decode=True)
        return worker_pb2.ReleaseResponse()

    async def Run(self, request_iterator, context):  # type: ignore[no-untyped-def]
        async for outputs in self._worker.run(DECODE, request_iterator):
            yield outputs
