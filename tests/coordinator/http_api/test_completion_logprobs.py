"""The logprobs object of /v1/completions: its rules over random tokens, whole and streamed, with and without echo."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.generation.logprobs import LOGPROB_FLOOR
from coordinator.http_api.logprobs import token_name
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.sampling import TokenLogprobs
from tests.coordinator.http_api.conftest import Serve
from tests.coordinator.text_fakes import (
    CONTEXT,
    EOS,
    Script,
    ScriptedScheduler,
    build_generator,
    byte_tokenizer,
    scheduler_of,
    text_model,
)
from tests.field_cases.test_text import client_of

PATH = "/v1/completions"
SMILE = "😊".encode()
EXTRA = [b"Hello", b" wor", b"ld\nSTOP", SMILE[:2], SMILE[2:], "é".encode(), b"ST", b"OP"]
IDS = st.one_of(st.integers(257, 256 + len(EXTRA)), st.sampled_from([97, 0xE2, 0x82, 0xAC, 83, EOS]))
KEYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def strict(text: str | bytes) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


async def whole_and_pieces(client: Any, **body: object) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The choice of the whole answer, and the choices of a stream's chunks."""
    answer = await client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = strict(answer.content)["choices"]
    stream = await client.post(PATH, json={**body, "stream": True})
    events = [line.removeprefix("data: ") for line in stream.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return choice, [strict(event)["choices"][0] for event in events]


def check_streamed_equals_whole(choice: dict[str, Any], pieces: list[dict[str, Any]]) -> None:
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    for key in KEYS:
        parts = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"][key]]
        assert parts == choice["logprobs"][key], key


def check_offsets(choice: dict[str, Any]) -> None:
    logprobs = choice["logprobs"]
    assert len({len(logprobs[key]) for key in KEYS}) == 1
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    assert "".join(logprobs["tokens"]) == choice["text"]


@given(
    prompt=st.lists(IDS, min_size=1, max_size=12),
    steps=st.lists(st.lists(IDS, min_size=1, max_size=3), min_size=1, max_size=8),
    echo=st.booleans(),
    stop=st.sampled_from([[], ["STOP"], ["TO", "é"]]),
    num_top=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
async def test_offsets_point_at_their_tokens_and_pieces_join_to_the_whole(
    prompt: list[int], steps: list[list[int]], echo: bool, stop: list[str], num_top: int
) -> None:
    """FIELD_CASES A07."""
    async with client_of(scheduler_of(*steps), EXTRA) as client:
        body = {"prompt": prompt, "echo": echo, "stop": stop, "logprobs": num_top, "max_tokens": CONTEXT - len(prompt)}
        answer = (await client.post(PATH, json=body)).json()
        choice, pieces = await whole_and_pieces(client, **body)
    check_streamed_equals_whole(choice, pieces)
    check_offsets(choice)
    usage, logprobs = answer["usage"], choice["logprobs"]
    num_tokens = usage["completion_tokens"] + (usage["prompt_tokens"] if echo else 0)
    assert len(logprobs["token_logprobs"]) == num_tokens
    first = (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0])
    assert (first == (None, None)) is echo
    assert None not in logprobs["token_logprobs"][1:]


async def test_what_a_stop_string_cuts_is_cut_from_its_token() -> None:
    async with client_of(scheduler_of([257], [259], [97]), EXTRA) as client:
        choice, pieces = await whole_and_pieces(client, prompt="a", stop="d\nST", logprobs=0)
    assert choice["text"] == "Hellol"
    assert choice["logprobs"]["tokens"] == ["Hello", "l"]
    assert choice["logprobs"]["text_offset"] == [0, 5]
    check_streamed_equals_whole(choice, pieces)


async def test_entries_wait_with_the_text_that_a_stop_string_holds_back() -> None:
    async with client_of(scheduler_of([97], [83], [84], [97]), EXTRA) as client:
        _, pieces = await whole_and_pieces(client, prompt="a", stop="STOP", logprobs=0)
    shown = [(piece["text"], piece["logprobs"] and piece["logprobs"]["tokens"]) for piece in pieces]
    assert shown == [("a", ["a"]), ("STa", ["S", "T", "a"]), ("", None)]


async def test_tokens_that_show_nothing_have_entries_at_once() -> None:
    async with client_of(scheduler_of([260], [261], [EOS]), EXTRA) as client:
        choice, pieces = await whole_and_pieces(client, prompt="a", logprobs=1)
    assert choice["logprobs"]["tokens"] == ["", "😊", ""]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]
    assert [piece["text"] for piece in pieces] == ["", "😊", "", ""]
    names = [list(top) for top in choice["logprobs"]["top_logprobs"]]
    assert names == [["bytes:\\xf0\\x9f"], ["bytes:\\x98\\x8a"], ["<eos>"]]


@pytest.mark.parametrize("prompts", [["héllo", "x"], [list("héllo".encode()), [ord("x")]]])
async def test_echo_puts_the_prompt_before_each_choice(prompts: object, serve: Serve) -> None:
    async with serve(build_generator(scheduler_of(b"ab", b"c", [EOS]))) as client:
        body = {"prompt": prompts, "n": 2, "echo": True}
        answer = (await client.post(PATH, json=body)).json()
        stream = await client.post(PATH, json={**body, "stream": True})
    assert [choice["text"] for choice in answer["choices"]] == ["hélloabc", "hélloabc", "xabc", "xabc"]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    texts = ["", "", "", ""]
    for event in stream.text.split("\n\n")[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["hélloabc", "hélloabc", "xabc", "xabc"]


async def test_an_echo_waits_for_the_first_token(serve: Serve) -> None:
    """So that a failure before it still has a status of its own."""
    lost = PdserveError(ErrorReason.WORKER_LOST, "gone")
    async with serve(build_generator(scheduler_of(error=lost))) as client:
        answer = await client.post(PATH, json={"prompt": "a", "echo": True, "stream": True})
    assert answer.status_code == 503


async def test_minus_infinity_is_told_as_the_floor(serve: Serve) -> None:
    """FIELD_CASES B05: in tokens, in top entries, in prompts; everything stays strict JSON."""
    impossible = TokenLogprobs(-math.inf, ((97, -math.inf), (98, -1e30)))
    script = Script([[97], [EOS]], logprobs_of=lambda _id, _num: impossible)
    generator = build_generator(ScriptedScheduler(lambda _request: script))
    async with serve(generator) as client:
        choice, pieces = await whole_and_pieces(client, prompt="xy", echo=True, logprobs=2, top_k=1)
    check_streamed_equals_whole(choice, pieces)
    assert choice["logprobs"]["token_logprobs"] == [None, LOGPROB_FLOOR, LOGPROB_FLOOR, LOGPROB_FLOOR]
    assert choice["logprobs"]["top_logprobs"][2] == {"a": LOGPROB_FLOOR, "b": LOGPROB_FLOOR}


async def test_the_token_itself_is_always_among_the_top_and_the_better_of_one_name_stays(serve: Serve) -> None:
    logprobs = TokenLogprobs(-3.0, ((257, -1.0), (258, -2.0)))
    script = Script([[97]], logprobs_of=lambda _id, _num: logprobs)
    model = text_model(byte_tokenizer([b"same"]))
    generator = build_generator(ScriptedScheduler(lambda _request: script), model)
    async with serve(generator) as client:
        choice, _ = await whole_and_pieces(client, prompt="x", logprobs=2)
    assert choice["logprobs"]["top_logprobs"] == [{"same": -1.0, "": -2.0, "a": -3.0}]


async def test_a_worker_that_leaves_logprobs_out_is_an_error(serve: Serve) -> None:
    scheduler = scheduler_of(b"a")
    async with serve(build_generator(scheduler)) as client:
        submit = scheduler.submit

        def forget(requests: Any) -> Any:
            streams = submit(requests)
            for stream in streams:
                stream._logprobs = lambda _ids: ()  # type: ignore[method-assign]
            return streams

        scheduler.submit = forget  # type: ignore[method-assign]
        answer = await client.post(PATH, json={"prompt": "x", "logprobs": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")


def test_names_of_tokens() -> None:
    tokenizer = byte_tokenizer([b"\xe2\x82", b"ok"])
    assert [token_name(tokenizer, i) for i in (257, 258, EOS, 97)] == ["bytes:\\xe2\\x82", "ok", "<eos>", "a"]
