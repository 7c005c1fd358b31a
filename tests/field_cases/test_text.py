"""A01, A02 and E05 through the HTTP app: a scripted model's tokens, whole and streamed, over both endpoints."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from tests.coordinator.http_api.conftest import app_of
from tests.coordinator.text.test_output_text import splits
from tests.coordinator.text_fakes import (
    EOS,
    ScriptedScheduler,
    build_generator,
    byte_tokenizer,
    scheduler_of,
    text_model,
)

ENDPOINTS = ["/v1/completions", "/v1/chat/completions"]
SMILE = "😊".encode()


@dataclass(frozen=True)
class Outcome:
    text: str
    finish_reason: str
    completion_tokens: int


@dataclass(frozen=True)
class Streamed:
    """`deltas`: the text of each chunk before the one with the finish reason."""

    outcome: Outcome
    deltas: tuple[str, ...]


def text_of(choice: dict[str, Any]) -> str:
    """Of a completion or a chat, whole or a chunk."""
    found = choice.get("message", choice.get("delta", {"content": choice.get("text")}))
    return str(found.get("content") or "")


def client_of(scheduler: ScriptedScheduler, tokens: Sequence[bytes] = ()) -> httpx.AsyncClient:
    """A client of an app whose model emits the scheduler's script; `tokens` have the ids from 257 on."""
    app = app_of(build_generator(scheduler, text_model(byte_tokenizer(tokens))))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=20)


def body_of(endpoint: str, **fields: object) -> dict[str, object]:
    prompt = {"prompt": "a"} if endpoint == ENDPOINTS[0] else {"messages": [{"role": "user", "content": "a"}]}
    return {**prompt, **fields}


async def whole(client: httpx.AsyncClient, endpoint: str, **fields: object) -> Outcome:
    answer = (await client.post(endpoint, json=body_of(endpoint, **fields))).json()
    (choice,) = answer["choices"]
    return Outcome(text_of(choice), choice["finish_reason"], answer["usage"]["completion_tokens"])


async def streamed(client: httpx.AsyncClient, endpoint: str, **fields: object) -> Streamed:
    """Checks also that the stream ends as it should: finish reason, usage, [DONE], each once and in this order."""
    body = body_of(endpoint, **fields, stream=True, stream_options={"include_usage": True})
    response = await client.post(endpoint, json=body)
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    usage = chunks.pop()["usage"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    texts = [text_of(chunk["choices"][0]) for chunk in chunks]
    assert texts[-1] == "", "text held back comes before the last chunk"
    return Streamed(Outcome("".join(texts), reasons[-1], usage["completion_tokens"]), tuple(texts))


async def both(client: httpx.AsyncClient, endpoint: str, **fields: object) -> Outcome:
    """The outcome, the same streamed and whole; every piece that was shown belongs to it."""
    answer = await whole(client, endpoint, **fields)
    stream = await streamed(client, endpoint, **fields)
    assert stream.outcome == answer
    shown = ""
    for delta in stream.deltas:
        shown += delta
        assert answer.text.startswith(shown)
    return answer


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_cut_character_is_dropped_on_both_paths(endpoint: str) -> None:
    """A01."""
    scheduler = scheduler_of([257], [ord("!")], [258], [259], [EOS])
    async with client_of(scheduler, [b"Hello", b" " + SMILE[:2], SMILE[2:]]) as client:
        for max_tokens, text in enumerate(["Hello", "Hello!", "Hello! ", "Hello! 😊"], start=1):
            assert await both(client, endpoint, max_tokens=max_tokens) == Outcome(text, "length", max_tokens)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_no_piece_of_a_stop_string_is_ever_shown(endpoint: str) -> None:
    """A02: whatever the split into tokens, here every fourth of all 256."""
    for pieces in splits(b"DEFGHIJKL")[::4]:
        extra = sorted({piece for piece in pieces if len(piece) > 1})
        ids = [257 + extra.index(piece) if len(piece) > 1 else piece[0] for piece in pieces]
        async with client_of(scheduler_of(*([token_id] for token_id in ids), [EOS]), extra) as client:
            answer = await both(client, endpoint, stop=["DEFGHIJ"])
        assert (answer.text, answer.finish_reason) == ("", "stop")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_stop_string_inside_a_token_ends_the_answer(endpoint: str) -> None:
    """A02: stop "Pari", token " Paris"."""
    async with client_of(scheduler_of([257], [ord(".")], hang=True), [b" Paris"]) as client:
        assert await both(client, endpoint, stop="Pari") == Outcome(" ", "stop", 1)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_what_was_held_for_a_stop_string_comes_before_the_last_chunk(endpoint: str) -> None:
    """A02: at the end of the tokens, and at max_tokens."""
    async with client_of(scheduler_of(*([byte] for byte in b"xDEFG"), [EOS])) as client:
        assert await both(client, endpoint, stop=["DEFGHIJ"]) == Outcome("xDEFG", "stop", 6)
        assert await both(client, endpoint, stop=["DEFGHIJ"], max_tokens=4) == Outcome("xDEF", "length", 4)
        held = await streamed(client, endpoint, stop=["DEFGHIJ"])
    assert [delta for delta in held.deltas if delta] == ["x", "DEFG"]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_first_tokens_that_end_the_answer(endpoint: str) -> None:
    """E05: EOS, a stop id, a stop string, and EOS that is to be ignored."""
    async with client_of(scheduler_of([EOS], [ord("a")], [EOS], [ord("b")], [EOS], hang=True)) as client:
        assert await both(client, endpoint) == Outcome("", "stop", 1)
        assert await both(client, endpoint, ignore_eos=True, max_tokens=5) == Outcome("ab", "length", 5)
    scheduler = scheduler_of([ord("z")], [ord("a")], hang=True)
    async with client_of(scheduler) as client:
        assert await both(client, endpoint, stop=["z"]) == Outcome("", "stop", 1)
        assert scheduler.num_cancels == 2
        assert await both(client, endpoint, stop_token_ids=[ord("z")]) == Outcome("", "stop", 1)
        assert scheduler.num_cancels == 2


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
async def test_max_tokens_is_exact_and_the_stream_is_closed(endpoint: str, max_tokens: int) -> None:
    """E05."""
    async with client_of(scheduler_of(*([byte] for byte in b"abcdefgh"), hang=True)) as client:
        assert await both(client, endpoint, max_tokens=max_tokens) == Outcome(
            "abcdefgh"[:max_tokens], "length", max_tokens
        )


async def test_ids_between_the_tokenizers_end_and_the_embeddings_are_taken() -> None:
    """C02: as docs/api.md rules; from the embedding's end on they are refused by index."""
    model = text_model()
    rows = model.info.vocab_size + 7
    padded = replace(model, info=replace(model.info, vocab_size=rows))
    app = app_of(build_generator(scheduler_of([ord("x")], [EOS]), padded))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=20) as client:
        assert (await client.post(ENDPOINTS[0], json={"prompt": [1, rows - 1]})).status_code == 200
        refused = await client.post(ENDPOINTS[0], json={"prompt": [1, rows]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt[1]")
