from collections.abc import AsyncIterator

import pytest

from pdserve.core.ids import SequenceId
from pdserve.serving import output_streams
from pdserve.serving.output_streams import MAX_BATCH_BYTES, OutputStreams
from pdserve.v1 import common_pb2, worker_pb2


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


async def test_what_is_too_large_for_one_message_goes_in_several_in_order() -> None:
    """Many prompts' logprobs at once: a message above gRPC's limit would end the stream of all."""
    streams = OutputStreams(1, lambda: 0, lambda _: None)
    top = [common_pb2.TokenLogprob(token_id=200_000, logprob=-1.0)] * 20
    large = worker_pb2.SequenceOutput(prompt_logprobs=[common_pb2.TokenLogprobs(logprob=-1.0, top=top)] * 6_000)
    small = worker_pb2.SequenceOutput(token_ids=[1])
    outputs = [large, small, large, large, small, small, large]

    def put_all(_: worker_pb2.DecodeCommands) -> None:
        for number, output in enumerate(outputs):
            copy = worker_pb2.SequenceOutput()
            copy.CopyFrom(output)
            streams.put(SequenceId(7, number), copy)

    messages = [message async for message in streams.run(commands(), put_all)]
    assert [output.request_id.sequence for message in messages for output in message.outputs] == list(range(7))
    assert len(messages) < len(outputs)
    assert all(message.ByteSize() < MAX_BATCH_BYTES + 1_000 for message in messages)


async def test_an_output_larger_than_a_batch_is_sent_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_streams, "MAX_BATCH_BYTES", 1)
    streams = OutputStreams(1, lambda: 0, lambda _: None)

    def put_two(_: worker_pb2.DecodeCommands) -> None:
        for number in range(2):
            streams.put(SequenceId(7, number), worker_pb2.SequenceOutput(token_ids=[1]))

    messages = [message async for message in streams.run(commands(), put_two)]
    assert [len(message.outputs) for message in messages] == [1, 1]
