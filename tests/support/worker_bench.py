"""Real prefill, decode and colocated workers (engines, gRPC servers, KV transfer) around a model without weights.

A test plays the coordinator. Everything runs in the test's process, over loopback sockets.
"""

import asyncio
import itertools
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import colocated_service.main
import decode_service.main
import prefill_service.main
from pdserve.client.channels import aio_channel, aio_server
from pdserve.client.wire import (
    error_from_proto,
    finish_reason_from_proto,
    kv_layout_to_proto,
    logprobs_from_proto,
    sampling_to_proto,
)
from pdserve.core.errors import PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.model_info import ModelInfo
from pdserve.core.sampling import FinishReason, SamplingParams, TokenLogprobs
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.ledger import ReservationLedger
from pdserve.engine.sequence import Chunk
from pdserve.engine.step_loop import StageResources, Turn
from pdserve.serving.settings import (
    ColocatedSettings,
    PrefillSettings,
    Settings,
    TransferSettings,
    WorkerSettings,
)
from pdserve.v1 import common_pb2, fleet_pb2, worker_pb2, worker_pb2_grpc
from pdserve.worker.parts import Worker, WorkerParts, prefix_scope
from tests.support.fake_engine import FakeRunner, FakeStore

EOS = 0
WAIT_S = 20.0
COORDINATOR = 7

BUILDS = {
    "prefill": prefill_service.main.build,
    "decode": decode_service.main.build,
    "colocated": colocated_service.main.build,
}


def bench_settings(
    *,
    block_size: int = 4,
    token_budget: int = 8,
    lease_s: float = 10.0,
    transfer_lease_s: float = 10.0,
    prefix_cache: bool = True,
) -> Settings:
    return Settings(
        worker=WorkerSettings(block_size=block_size, lease_s=lease_s, max_batch_size=8, prefix_cache=prefix_cache),
        prefill=PrefillSettings(token_budget=token_budget),
        colocated=ColocatedSettings(token_budget=token_budget),
        transfer=TransferSettings(lease_s=transfer_lease_s),
    )


FAKE_MODEL = ModelInfo("fake", "f00d", "fake", "float32", 97, 4096, (EOS,))


class BenchWorker:
    """One worker of a role. `store` and `before_run` may plant faults; `runner`, `store` and `model` may be real."""

    def __init__(
        self,
        role: str,
        settings: Settings | None = None,
        *,
        num_blocks: int = 64,
        store: Any = None,
        before_run: Callable[[Seq[Chunk]], None] = lambda _: None,
        runner: Any = None,
        model: ModelInfo = FAKE_MODEL,
    ) -> None:
        self.role = role
        self.model = model
        self.settings = settings or bench_settings()
        block_size = self.settings.worker.block_size
        self.store = store or FakeStore(num_blocks, block_size)
        self.runner = runner or FakeRunner(block_size, before_run, self.store)
        self.pool = BlockPool(self.store.num_blocks, threading.Lock())
        self.ledger = ReservationLedger(self.store.num_blocks, block_size, self.settings.worker.lease_s)
        self.incarnation = next(_incarnations)
        self.crashes: list[BaseException] = []
        self.changed = asyncio.Condition()

    async def start(self) -> "BenchWorker":
        loop = asyncio.get_running_loop()
        loaded = cast(Any, SimpleNamespace(runner=self.runner, paged_kv=self.store, model_info=self.model))
        eos_token_ids = frozenset(self.model.eos_token_ids)
        scope = prefix_scope(self.settings, loaded)
        parts = WorkerParts(
            settings=self.settings,
            worker_id=self.role,
            incarnation=self.incarnation,
            loaded=loaded,
            pool=self.pool,
            ledger=self.ledger,
            resources=StageResources(self.pool, self.settings.worker.block_size, eos_token_ids, scope),
            publish=lambda turn: loop.call_soon_threadsafe(self._dispatch, turn),
            on_crash=self.crashes.append,
            announce=self._announce,
        )
        self.worker: Worker = BUILDS[self.role](parts)
        self.server = aio_server()
        self.worker.add_to_server(self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.worker.engine.start()
        await self.server.start()
        self.channel = aio_channel(f"127.0.0.1:{self.port}")
        return self

    async def stop(self) -> None:
        for service in self.worker.services:
            service.close()
        await self.channel.close()
        await self.server.stop(None)
        await asyncio.to_thread(self.worker.engine.stop)
        await asyncio.to_thread(self.worker.close)
        assert not self.crashes

    def next_cancel(self) -> asyncio.Future[None]:
        """Done when the worker has handled a cancel on each of its stages."""
        cancelled = asyncio.get_running_loop().create_future()
        left = [cast(Any, service).requests for service in self.worker.services]
        for requests in list(left):

            def cancel(sequence_id: SequenceId, requests: Any = requests) -> None:
                type(requests).cancel(requests, sequence_id)
                if requests in left:
                    left.remove(requests)
                if not left and not cancelled.done():
                    cancelled.set_result(None)

            requests.cancel = cancel
        return cancelled

    def _dispatch(self, turn: Turn) -> None:
        for service, events, snapshot in zip(self.worker.services, turn.events, turn.snapshots, strict=True):
            service.handle_turn(events, snapshot)
        self._announce()

    def _announce(self) -> None:
        async def notify() -> None:
            async with self.changed:
                self.changed.notify_all()

        self._notifying = asyncio.ensure_future(notify())

    @property
    def is_empty(self) -> bool:
        return (
            self.pool.num_free_blocks == self.pool.num_blocks
            and self.ledger.num_reserved_blocks == 0
            and all(service.num_requests == 0 for service in self.worker.services)
        )

    async def until_empty(self) -> None:
        """Everything was given back: blocks, reservations, requests."""
        async with asyncio.timeout(WAIT_S), self.changed:
            await self.changed.wait_for(lambda: self.is_empty)
        self.pool.check_integrity()


async def until(condition: Callable[[], bool]) -> None:
    """For what announces itself to nobody, such as another thread's inbox."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


_incarnations = itertools.count(100)


@dataclass
class Stream:
    """What came back for one sequence."""

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: PdserveError | None = None
    transferred: bool = False
    num_cached_tokens: int = 0

    @property
    def output(self) -> list[int]:
        assert sorted(self.tokens) == list(range(len(self.tokens)))
        return [self.tokens[index] for index in sorted(self.tokens)]


class Coordinator:
    """Just enough of a coordinator: Run streams to one prefill and one decode worker, reserve, submit, cancel."""

    def __init__(self, prefill: BenchWorker, decode: BenchWorker, incarnation: int = COORDINATOR) -> None:
        self.prefill, self.decode = prefill, decode
        self.incarnation = incarnation
        self.adapter = self.cache_salt = ""
        self.streams: dict[int, Stream] = defaultdict(Stream)
        self.changed = asyncio.Condition()
        self._to_prefill: asyncio.Queue[worker_pb2.PrefillCommand] = asyncio.Queue()
        self._to_decode: asyncio.Queue[worker_pb2.DecodeCommand] = asyncio.Queue()
        self.decode_stub = worker_pb2_grpc.DecodeStub(decode.channel)
        prefill_stub = worker_pb2_grpc.PrefillStub(prefill.channel)
        self.calls = [prefill_stub.Run(self._prefill_commands()), self.decode_stub.Run(self._decode_commands())]
        self._readers = [asyncio.create_task(self._read(call)) for call in self.calls]

    async def _prefill_commands(self) -> AsyncIterator[worker_pb2.PrefillCommands]:
        yield worker_pb2.PrefillCommands(coordinator_incarnation=self.incarnation)
        while True:
            command = await self._to_prefill.get()
            yield worker_pb2.PrefillCommands(coordinator_incarnation=self.incarnation, commands=[command])

    async def _decode_commands(self) -> AsyncIterator[worker_pb2.DecodeCommands]:
        yield worker_pb2.DecodeCommands(coordinator_incarnation=self.incarnation)
        while True:
            command = await self._to_decode.get()
            yield worker_pb2.DecodeCommands(coordinator_incarnation=self.incarnation, commands=[command])

    async def _read(self, call: Any) -> None:
        async for message in call:
            async with self.changed:
                for output in message.outputs:
                    self._take(output)
                self.changed.notify_all()

    def _take(self, output: worker_pb2.SequenceOutput) -> None:
        stream = self.streams[output.request_id.sequence]
        for offset, token_id in enumerate(output.token_ids):
            index = output.first_index + offset
            assert index not in stream.tokens, "an index came twice"
            stream.tokens[index] = token_id
            if output.logprobs:
                stream.logprobs[index] = logprobs_from_proto(output.logprobs[offset])
        stream.prompt_logprobs += tuple(map(logprobs_from_proto, output.prompt_logprobs))
        stream.transferred |= output.transferred
        stream.num_cached_tokens += output.num_cached_tokens
        reason = finish_reason_from_proto(output.finish_reason)
        if reason is not None:
            assert stream.finish_reason is None or reason is FinishReason.ERROR
            stream.finish_reason = reason
        if output.HasField("error"):
            stream.error = error_from_proto(output.error)

    # --- what a test does ---------------------------------------------------------------------------------------------

    def request_id(self, number: int) -> common_pb2.RequestId:
        return common_pb2.RequestId(coordinator_incarnation=self.incarnation, sequence=number)

    def context(self, number: int, deadline_s: float = 60.0) -> worker_pb2.RequestContext:
        return worker_pb2.RequestContext(
            request_id=self.request_id(number),
            deadline_remaining_ms=round(deadline_s * 1000),
            model="fake",
            adapter=self.adapter,
            cache_salt=self.cache_salt,
        )

    async def connected(self) -> "Coordinator":
        """Both streams are open on the workers: what happens from now on is told to them."""
        for service in (self.prefill.worker.services[0], self.decode.worker.services[-1]):
            streams = cast(Any, service)._outputs._streams
            await until(lambda open_streams=streams: self.incarnation in open_streams)
        return self

    async def reserve(self, number: int, num_tokens: int, prompt: Seq[int] = ()) -> worker_pb2.ReserveResponse:
        request = worker_pb2.ReserveRequest(
            context=self.context(number), num_tokens_max=num_tokens, num_tokens_expected=num_tokens, token_ids=prompt
        )
        return await self.decode_stub.Reserve(request)

    def target(self, reservation_id: int, **changes: Any) -> worker_pb2.DecodeTarget:
        decode = self.decode
        fields = {
            "worker": fleet_pb2.WorkerId(worker_id=decode.role, incarnation=decode.incarnation),
            "kv_address": f"127.0.0.1:{decode.worker.kv_port}",
            "reservation_id": reservation_id,
            "transport": "local" if decode is self.prefill else "grpc",
            "kv_layout": kv_layout_to_proto(decode.store.layout),
        }
        return worker_pb2.DecodeTarget(**{**fields, **changes})

    def submit_prefill(
        self,
        number: int,
        prompt: Seq[int],
        params: SamplingParams,
        target: worker_pb2.DecodeTarget | None,
        deadline_s: float = 60.0,
    ) -> None:
        submit = worker_pb2.PrefillSubmit(
            context=self.context(number, deadline_s),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=sampling_to_proto(params),
            target=target,
        )
        self._to_prefill.put_nowait(worker_pb2.PrefillCommand(submit=submit))

    def submit_decode(
        self,
        number: int,
        prompt: Seq[int],
        params: SamplingParams,
        reservation_id: int,
        deadline_s: float = 60.0,
    ) -> None:
        submit = worker_pb2.DecodeSubmit(
            context=self.context(number, deadline_s),
            reservation_id=reservation_id,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=sampling_to_proto(params),
        )
        self._to_decode.put_nowait(worker_pb2.DecodeCommand(submit=submit))

    async def submit(self, number: int, prompt: Seq[int], **sampling: Any) -> Stream:
        """Reserve and send both halves of a request, as the coordinator does."""
        params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
        if params.max_tokens == 1:
            self.submit_prefill(number, prompt, params, None)
            return self.streams[number]
        answer = await self.reserve(number, len(prompt) + params.max_tokens, prompt)
        assert answer.HasField("granted"), answer
        reservation_id, num_cached = answer.granted.reservation_id, answer.granted.num_cached_blocks
        self.submit_decode(number, prompt, params, reservation_id)
        self.submit_prefill(number, prompt, params, self.target(reservation_id, num_cached_blocks=num_cached))
        return self.streams[number]

    def cancel(self, number: int, *, prefill: bool = True, decode: bool = True) -> None:
        cancel = worker_pb2.Cancel(request_id=self.request_id(number))
        if prefill:
            self._to_prefill.put_nowait(worker_pb2.PrefillCommand(cancel=cancel))
        if decode:
            self._to_decode.put_nowait(worker_pb2.DecodeCommand(cancel=cancel))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self.changed:
            await self.changed.wait_for(condition)

    async def finished(self, number: int) -> Stream:
        stream = self.streams[number]
        await self.until(lambda: stream.finish_reason is not None)
        return stream

    async def close(self) -> None:
        for call in self.calls:
            call.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
