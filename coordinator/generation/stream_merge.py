"""Several sequences' streams as one, in order of arrival, at most one event of each read ahead."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable

from coordinator.sequences import SequenceEnd, TokenDelta
from pdserve.core.errors import ErrorReason, PdserveError

Event = TokenDelta | SequenceEnd


class StreamMerge:
    """Reading ahead by one keeps back-pressure: who does not call `next` leaves the streams unread."""

    def __init__(self, streams: Iterable[AsyncIterator[Event]]) -> None:
        self._streams = dict(enumerate(streams))
        self._alone = len(self._streams) == 1
        self._reads: dict[int, asyncio.Task[Event | None]] = {}
        self._arrived: deque[int] = deque()

    @property
    def open(self) -> frozenset[int]:
        """Numbers of the streams that have neither ended nor been dropped."""
        return frozenset(self._streams)

    async def next(self) -> tuple[int, Event]:
        """The next event and the number of its stream; at least one must be open. An end closes its stream.

        Raises:
            PdserveError: a stream failed, or ended without telling how; it is closed then.
        """
        if self._alone:
            index = 0
            read = _read(self._streams[0])
        else:
            index = await self._first_arrived()
            read = _result(self._reads.pop(index))
        try:
            event = await read
        except PdserveError:
            del self._streams[index]
            raise
        if event is None:
            del self._streams[index]
            raise PdserveError(ErrorReason.INTERNAL, "the sequence's stream broke off")
        if isinstance(event, SequenceEnd):
            del self._streams[index]
        return index, event

    def drop(self, index: int) -> None:
        """Read no more from this stream."""
        self._streams.pop(index, None)
        if (read := self._reads.pop(index, None)) is not None:
            read.cancel()
        if index in self._arrived:
            self._arrived.remove(index)

    def close(self) -> None:
        for index in list(self._streams):
            self.drop(index)

    async def _first_arrived(self) -> int:
        if not self._arrived:
            for index, stream in self._streams.items():
                if index not in self._reads:
                    self._reads[index] = asyncio.create_task(_read(stream))
                    self._reads[index].add_done_callback(_retrieve)
            await asyncio.wait(self._reads.values(), return_when=asyncio.FIRST_COMPLETED)
            self._arrived.extend(index for index, read in self._reads.items() if read.done())
        return self._arrived.popleft()


async def _read(stream: AsyncIterator[Event]) -> Event | None:
    return await anext(stream, None)


async def _result(read: "asyncio.Task[Event | None]") -> Event | None:
    return read.result()


def _retrieve(read: "asyncio.Task[Event | None]") -> None:
    """So that the failure of a stream nobody reads any more is not reported as forgotten."""
    if not read.cancelled():
        read.exception()
