"""The Run streams of a worker's service: commands handled as they come, outputs sent in one message per wake-up."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol, TypeVar

from pdserve.client.wire import error_to_proto, finish_reason_to_proto, sequence_id_to_proto
from pdserve.core.errors import PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.sampling import FinishReason
from pdserve.v1 import worker_pb2

MAX_BATCH_BYTES = 4 * 1024 * 1024
"""More is sent in several messages. One output is never larger by itself: see MAX_PROMPT_LOGPROBS."""


class Commands(Protocol):
    """PrefillCommands or DecodeCommands, as far as the stream is concerned."""

    @property
    def coordinator_incarnation(self) -> int: ...


CommandsT = TypeVar("CommandsT", bound=Commands)


class _OutputStream:
    """What waits to be sent to one coordinator."""

    def __init__(self) -> None:
        self._pending: list[worker_pb2.SequenceOutput] = []
        self._ready = asyncio.Event()
        self._closed = False

    def put(self, output: worker_pb2.SequenceOutput) -> None:
        self._pending.append(output)
        self._ready.set()

    def close(self) -> None:
        """End the stream once what is pending has been sent."""
        self._closed = True
        self._ready.set()

    async def batches(self) -> AsyncIterator[list[worker_pb2.SequenceOutput]]:
        while True:
            await self._ready.wait()
            self._ready.clear()
            while self._pending:
                yield self._take_batch()
            if self._closed:
                return

    def _take_batch(self) -> list[worker_pb2.SequenceOutput]:
        """As many as one message may hold, at least one."""
        sizes = accumulate(output.ByteSize() for output in self._pending)
        num_taken = max(1, sum(size <= MAX_BATCH_BYTES for size in sizes))
        batch, self._pending = self._pending[:num_taken], self._pending[num_taken:]
        return batch


@dataclass(slots=True)
class OutputStreams:
    """The open streams of one service, by coordinator incarnation. Outputs for one that is gone are dropped.

    `step_count` is read for every message. `on_end` hears of a coordinator whenever a stream of its ends or is
    replaced: what it asked for on that stream, it has given up.
    """

    worker_incarnation: int
    step_count: Callable[[], int]
    on_end: Callable[[int], None]
    _streams: dict[int, _OutputStream] = field(default_factory=dict[int, _OutputStream])

    async def run(
        self, commands: AsyncIterator[CommandsT], handle: Callable[[CommandsT], None]
    ) -> AsyncIterator[worker_pb2.WorkerOutputs]:
        """Serve one Run call: its first message names the coordinator."""
        first = await anext(aiter(commands), None)
        if first is None:
            return
        coordinator = first.coordinator_incarnation
        stream = self._open(coordinator)

        async def read() -> None:
            try:
                handle(first)
                async for message in commands:
                    handle(message)
            finally:
                stream.close()

        reader = asyncio.create_task(read())
        try:
            async for batch in stream.batches():
                yield worker_pb2.WorkerOutputs(
                    worker_incarnation=self.worker_incarnation, step=self.step_count(), outputs=batch
                )
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            if self._streams.get(coordinator) is stream:
                del self._streams[coordinator]
                self.on_end(coordinator)

    def close_all(self) -> None:
        """End every stream once what is pending has been sent."""
        for stream in self._streams.values():
            stream.close()

    def put(self, sequence_id: SequenceId, output: worker_pb2.SequenceOutput) -> None:
        stream = self._streams.get(sequence_id.coordinator_incarnation)
        if stream is not None:
            output.request_id.CopyFrom(sequence_id_to_proto(sequence_id))
            stream.put(output)

    def put_error(self, sequence_id: SequenceId, error: PdserveError) -> None:
        reason = finish_reason_to_proto(FinishReason.ERROR)
        self.put(sequence_id, worker_pb2.SequenceOutput(finish_reason=reason, error=error_to_proto(error)))

    def _open(self, coordinator_incarnation: int) -> _OutputStream:
        stream = _OutputStream()
        if (old := self._streams.get(coordinator_incarnation)) is not None:
            old.close()
            self.on_end(coordinator_incarnation)
        self._streams[coordinator_incarnation] = stream
        return stream
