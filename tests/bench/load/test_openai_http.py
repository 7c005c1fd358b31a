"""The OpenAI client against a server with set timing: which tokens it counts when, and which answers are errors."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_bench.load import openai_http
from pdserve_bench.load.client import Answer, RequestError
from pdserve_bench.load.openai_answer import AnswerReader
from pdserve_bench.load.openai_http import OpenAiClient, Timeouts, served_model
from pdserve_bench.load.plan import PlannedRequest
from tests.support.timed_server import MODEL, Behaviour, TimedServer

REQUEST = PlannedRequest(0, 0.0, (5, 6, 7), 64, tenant="a")
CHUNKS = tuple(range(1, 9))
SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7]


@asynccontextmanager
async def client_of(server: TimedServer, **options: object) -> AsyncIterator[OpenAiClient]:
    client = OpenAiClient(server.base_url, MODEL, **options)  # type: ignore[arg-type]
    try:
        yield client
    finally:
        await client.close()


async def ask(behaviour: Behaviour, request: PlannedRequest = REQUEST, **options: object) -> tuple[Answer, list[int]]:
    counts: list[int] = []
    async with TimedServer(lambda _: behaviour) as server, client_of(server, **options) as client:
        return await client.send(request, counts.append), counts


async def failure(behaviour: Behaviour) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await ask(behaviour)
    return caught.value


def whole_text(num_tokens: int) -> str:
    return "".join(f"é{number} " for number in range(num_tokens))


@pytest.mark.parametrize("bytes_per_write", [1 << 20, 7])
async def test_j02_tokens_are_those_of_the_usage_however_many_a_chunk_carries(bytes_per_write: int) -> None:
    behaviour = Behaviour(tokens_per_chunk=CHUNKS, bytes_per_write=bytes_per_write, num_cached=2)
    answer, counts = await ask(behaviour)
    assert counts == SIZES
    assert answer == Answer("length", 64, 2, counts_are_exact=True, output=whole_text(64))


@pytest.mark.parametrize("usage", ["final", "none"])
@pytest.mark.parametrize("continuous_usage", [True, False])
async def test_without_usage_in_chunks_each_counts_one_and_counts_are_not_exact(
    usage: str, continuous_usage: bool
) -> None:
    behaviour = Behaviour(tokens_per_chunk=CHUNKS, usage=usage)  # type: ignore[arg-type]
    answer, counts = await ask(behaviour, continuous_usage=continuous_usage)
    assert counts == [1] * len(SIZES)
    assert (answer.num_output_tokens, answer.counts_are_exact) == (64 if usage == "final" else None, False)


@pytest.mark.parametrize("usage", ["continuous", "none"])
async def test_a_chunk_without_tokens_is_no_first_token(usage: str) -> None:
    behaviour = Behaviour(role_chunk=True, usage=usage)  # type: ignore[arg-type]
    _, counts = await ask(behaviour)
    assert counts == [1] * 64


async def test_what_is_sent() -> None:
    async with TimedServer() as server, client_of(server, api_keys={"": "k0", "a": "ka"}) as client:
        await client.send(REQUEST, lambda _: None)
        await client.send(PlannedRequest(1, 0.0, (9,), 1, tenant="b"), lambda _: None)
        assert server.authorizations == ["Bearer ka", "Bearer k0"]
        assert server.num_connections == 1
        assert server.bodies[0] == {
            "model": MODEL,
            "prompt": [5, 6, 7],
            "max_tokens": 64,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    async with TimedServer() as server, client_of(server, continuous_usage=False) as client:
        await client.send(REQUEST, lambda _: None)
        assert server.bodies[0]["stream_options"] == {"include_usage": True}
        assert server.authorizations == [""]


@pytest.mark.parametrize(
    ("behaviour", "said", "rejected"),
    [
        (Behaviour(status=429), "HTTP 429: .*as set", True),
        (Behaviour(status=503), "HTTP 503", True),
        (Behaviour(status=400), "HTTP 400", False),
        (Behaviour(status=500), "HTTP 500", False),
        (Behaviour(end="error", num_before_end=3), "in mid-stream: .*as set", False),
        (Behaviour(end="error", num_before_end=0), "in mid-stream", False),
        (Behaviour(end="cut", num_before_end=3), "http://127", False),
    ],
)
async def test_what_is_no_answer_is_an_error(behaviour: Behaviour, said: str, rejected: bool) -> None:
    error = await failure(behaviour)
    assert error.rejected is rejected
    with pytest.raises(RequestError, match=said):
        raise error


async def test_an_empty_answer_is_given_as_it_is() -> None:
    answer, counts = await ask(Behaviour(end="empty"))
    assert (answer.num_output_tokens, answer.output, counts) == (0, "", [])


async def test_silence_and_absence_are_errors() -> None:
    async with (
        TimedServer(lambda _: Behaviour(end="never", num_before_end=1)) as server,
        client_of(server, timeouts=Timeouts(5.0, 0.1)) as client,
    ):
        with pytest.raises(RequestError, match="keeps silent"):
            await client.send(REQUEST, lambda _: None)
        await asyncio.wait_for(server.hung_up.wait(), 10)
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{own.getsockname()[1]}"
    client = OpenAiClient(url, MODEL)
    with pytest.raises(RequestError, match=url) as caught:
        await client.send(REQUEST, lambda _: None)
    await client.close()
    assert not caught.value.rejected
    with pytest.raises(RequestError, match=url):
        await served_model(url)


async def test_an_answer_is_whole_with_done_though_its_connection_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_http, "_LINGER_S", 0.02)
    async with TimedServer(lambda _: Behaviour(end="open")) as server, client_of(server) as client:
        answer = await asyncio.wait_for(client.send(REQUEST, lambda _: None), 10)
        await asyncio.wait_for(server.hung_up.wait(), 10)
    assert (answer.finish_reason, answer.num_output_tokens) == ("length", 64)


async def test_cancelling_the_task_hangs_up() -> None:
    async with (
        TimedServer(lambda _: Behaviour(end="never", num_before_end=3)) as server,
        client_of(server) as client,
    ):
        streaming = asyncio.Event()
        task = asyncio.create_task(client.send(REQUEST, lambda _: streaming.set()))
        await asyncio.wait_for(streaming.wait(), 10)
        task.cancel()
        await asyncio.wait_for(server.hung_up.wait(), 10)
        assert task.cancelled()


async def test_served_model() -> None:
    async with TimedServer() as server:
        assert await served_model(server.base_url + "/") == MODEL
        with pytest.raises(RequestError, match="HTTP 404"):
            await served_model(server.base_url + "/elsewhere")


def test_urls_and_endpoints_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ValueError, match="no token ids"):
        OpenAiClient("http://h", MODEL, endpoint="/v1/chat/completions")
    with pytest.raises(ValueError, match="'h:80' is no server's URL"):
        OpenAiClient("h:80", MODEL)


# --- the answer's own reading -----------------------------------------------------------------------------------------

STREAM = (
    'data: {"choices": [{"text": "é"}], "usage": {"completion_tokens": 2}}\n\n'
    ': still here\n\ndata: {"choices": [{"finish_reason": "length"}], "usage": {"completion_tokens": 3}}\n\n'
    'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n'
).encode()


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_an_answer_is_the_same_however_its_bytes_are_cut(cuts: list[int]) -> None:
    counts: list[int] = []
    reader = AnswerReader(counts.append)
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(STREAM)], strict=True):
        reader.feed(STREAM[begin:end])
    assert counts == [2, 1]
    assert reader.answer() == Answer("length", 3, None, counts_are_exact=True, output="é")


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"3",
        b"[]",
        b'{"choices": {"a": 1}}',
        b'{"choices": [3]}',
        b'{"usage": "x"}',
        b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1}}',
    ],
)
def test_nonsense_is_an_error(data: bytes) -> None:
    reader = AnswerReader(lambda _: None)
    with pytest.raises(RequestError, match="no event of a completion"):
        reader.feed(b"data: " + data + b"\n\n")


def test_a_stream_that_ends_early_is_an_error() -> None:
    reader = AnswerReader(lambda _: None)
    reader.feed(STREAM.removesuffix(b"data: [DONE]\n\n"))
    with pytest.raises(RequestError, match=r"without \[DONE\]"):
        reader.answer()


def test_a_server_that_gives_usage_with_its_last_choice_only_is_counted_by_chunks() -> None:
    counts: list[int] = []
    reader = AnswerReader(counts.append)
    reader.feed(b'data: {"choices": [{"text": "a"}]}\n\n' * 3)
    reader.feed(b'data: {"choices": [{"text": "", "finish_reason": "stop"}], "usage": {"completion_tokens": 9}}\n\n')
    reader.feed(b"data: [DONE]\n\n")
    assert (counts, reader.answer().num_output_tokens, reader.answer().counts_are_exact) == ([1] * 3, 9, False)
