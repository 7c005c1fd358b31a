"""Sending a generation to an HTTP client, streamed or whole, and noticing that the client has gone."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.generation.generation import Generation
from coordinator.http_api.bodies import StreamOptions
from coordinator.http_api.chat_answers import ChatAnswer
from coordinator.http_api.completion_answers import CompletionAnswer
from coordinator.http_api.errors import error_body, error_response, to_json
from coordinator.http_api.formats import AnswerFormat, Chunk, Totals
from pdserve.core.errors import ErrorReason, PdserveError

DONE = b"data: [DONE]\n\n"
UNREAD_GRACE_S = 5.0
"""How long past its deadline a stream may hang on a client that does not read."""

T = TypeVar("T")

OpenGeneration = AbstractAsyncContextManager[Generation]
MakeFormat = Callable[[Generation], AnswerFormat]


class ClientGone(Exception):
    """The client hung up; there is nobody to answer."""


async def until_disconnect(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Run `work`, cancelling it as soon as the client hangs up.

    `receive` must have delivered the whole body.

    Raises:
        ClientGone: the client hung up first.
    """
    task, watch = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def whole_answer(opening: OpenGeneration, make_format: MakeFormat) -> str:
    """Run a generation to its end and return the JSON of its answer."""
    async with opening as generation:
        answers = make_format(generation)
        totals = Totals(generation)
        async for event in generation:
            answers.add(event)
            totals.add(event)
        return await _to_json(answers.whole(totals.answer()))


class EventStream(Response):
    """Server-sent events of one generation, [DONE] last.

    A failure before the first token is an ordinary error response; a later one is an event `{"error": …}`, after which
    the stream ends without [DONE]. Each event is awaited, so a slow reader leaves the generation's streams unread.
    """

    def __init__(
        self, opening: OpenGeneration, make_format: MakeFormat, options: StreamOptions, clock: Callable[[], float]
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._opening = opening
        self._make_format = make_format
        self._options = options
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = _EventSender(send, self.raw_headers)
        try:
            await until_disconnect(receive, self._run(events))
        except ClientGone:
            return
        except PdserveError as error:
            if events.started:
                await events.last(_error_event(error))
            else:
                await error_response(error)(scope, receive, send)
        except asyncio.CancelledError:
            await events.broken_off(PdserveError(ErrorReason.DRAINING, "the server is stopping"))
            raise
        except Exception:
            await events.broken_off(PdserveError(ErrorReason.INTERNAL, "internal error"))
            raise

    async def _run(self, events: "_EventSender") -> None:
        async with self._opening as generation:
            try:
                async with asyncio.timeout(generation.deadline_s - self._clock() + UNREAD_GRACE_S):
                    await self._send_all(events, generation)
            except TimeoutError:
                # Nothing more can be said to a client that reads nothing.
                raise ClientGone from None

    async def _send_all(self, events: "_EventSender", generation: Generation) -> None:
        answers = self._make_format(generation)
        totals = Totals(generation)
        introduced: set[int] = set()

        async def say(chunk: Chunk | None) -> None:
            if chunk is not None and self._options.usage_in_every_chunk:
                chunk = chunk.model_copy(update={"usage": totals.answer()})
            await events.chunk(chunk)

        async for event in generation:
            if event.choice not in introduced:
                introduced.add(event.choice)
                await say(answers.first_chunk(event.choice))
            totals.add(event)
            await say(answers.chunk(event))
        if self._options.include_usage:
            await events.chunk(answers.usage_chunk(totals.answer()))
        await events.last(DONE)


class _EventSender:
    """One response: its head goes out with the first event, even one that has nothing to show."""

    def __init__(self, send: Send, raw_headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._raw_headers = raw_headers
        self.started = False

    async def chunk(self, chunk: Chunk | None) -> None:
        await self._start()
        if chunk is not None:
            body = _event(chunk.to_json().encode())
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def last(self, body: bytes) -> None:
        await self._start()
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def broken_off(self, error: PdserveError) -> None:
        """If the stream had begun, tell the client why it ends, unless that takes too long."""
        if self.started:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.last(_error_event(error))

    async def _start(self) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._raw_headers})


async def _to_json(answer: ChatAnswer | CompletionAnswer) -> str:
    """Choice by choice, as each may hold megabytes of logprobs, and other requests go on between them."""
    choices: list[str] = []
    for choice in answer.choices:
        choices.append(choice.to_json())
        await asyncio.sleep(0)
    # No text of the answer can hold this: in JSON its quotes would be escaped.
    empty = '"choices":[]'
    without = answer.model_copy(update={"choices": []}).to_json()
    return without.replace(empty, f"{empty[:-1]}{','.join(choices)}]", 1)


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _error_event(error: PdserveError) -> bytes:
    return _event(to_json(error_body(error)))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
