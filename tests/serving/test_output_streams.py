from collections.abc import AsyncIterator

import pytest

from pdserve.serving.output_streams import OutputStreams
from pdserve.v1 import worker_pb2


async def commands() -> AsyncIterator[worker_pb2.DecodeCommands]:
    yield worker_pb2.DecodeCommands(coordinator_incarnation=7)


async def nothing() -> AsyncIterator[worker_pb2.DecodeCommands]:
    return
    yield


def refuse(_: worker_pb2.DecodeCommands) -> None:
    raise ValueError("planted")


async def test_a_handler_that_fails_ends_the_call_and_the_stream() -> None:
    ended: list[int] = []
    streams = OutputStreams(1, lambda: 0, ended.append)
    with pytest.raises(ValueError, match="planted"):
        async for _ in streams.run(commands(), refuse):
            pass
    assert ended == [7]


async def test_a_call_without_a_message_is_nobodys() -> None:
    ended: list[int] = []
    streams = OutputStreams(1, lambda: 0, ended.append)
    assert [output async for output in streams.run(nothing(), refuse)] == []
    assert ended == []
