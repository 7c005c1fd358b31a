"""A07 and B05 in fleets of real processes, and logprobs of prompts as large as they may be."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.core.sampling import MAX_PROMPT_LOGPROBS
from tests.support.bench_fleet import fleet
from tests.support.fleet import COLOCATED, DISAGGREGATED, Fleet, run_fleet
from tests.support.front_door import front_door
from tests.support.tiny_models import write_tiny_llama
from tests.support.worker_bench import FAKE_MODEL, BenchWorker, bench_settings

PATH = "/v1/completions"
PROMPT = "The höuse of 3 reads \n\tand <|im_end|> writes; 日本語 again and again until the end of it."
WANTED: dict[str, Any] = {
    "prompt": PROMPT,
    "echo": True,
    "logprobs": 5,
    "top_k": 1,
    "temperature": 1,
    "max_tokens": 16,
    "ignore_eos": True,
    "min_tokens": 16,
}
KEYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def strict(text: str | bytes) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


async def ask(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    return strict(answer.content)


async def ask_streamed(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """The one choice put together from its chunks."""
    answer = await client.post(PATH, json={**body, "stream": True})
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    pieces = [strict(event)["choices"][0] for event in events]
    of_pieces = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
    logprobs = {key: [entry for piece in of_pieces for entry in piece[key]] for key in KEYS}
    reason = pieces[-1]["finish_reason"]
    return {"index": 0, "text": "".join(p["text"] for p in pieces), "logprobs": logprobs, "finish_reason": reason}


def check(answer: dict[str, Any]) -> None:
    """A07 and B05 of one whole answer."""
    (choice,), usage = answer["choices"], answer["usage"]
    text, logprobs = choice["text"], choice["logprobs"]
    assert {len(logprobs[key]) for key in KEYS} == {usage["prompt_tokens"] + usage["completion_tokens"]}
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert text[offset : offset + len(token)] == token
    assert text.startswith(PROMPT.replace("<|im_end|>", ""))
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    for value, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert -9999.0 <= value <= 0
        assert 5 <= len(top) <= 6
        assert value in top.values()


async def neighbours(client: httpx.AsyncClient) -> None:
    """Others, of every kind, to be in the same batches."""
    bodies = [
        {"prompt": "once upon a time " * (3 + n), "max_tokens": 40, "logprobs": n % 4, "echo": n % 2 == 0}
        for n in range(6)
    ]
    await asyncio.gather(*(ask(client, **body) for body in bodies))


async def check_an_echo_tells_what_the_answer_told(running: Fleet, client: httpx.AsyncClient) -> None:
    """Decode and prefill score a position alike."""
    prompt = [5, 6, 7, 8]
    fields = {"temperature": 0.0, "ignore_eos": True, "logprobs": 2}
    told = (await ask(client, prompt=prompt, max_tokens=20, **fields))["choices"][0]["logprobs"]
    ids = prompt + list((await running.generate(prompt, max_tokens=20, temperature=0.0, ignore_eos=True)).token_ids)
    echoed = (await ask(client, prompt=ids, max_tokens=1, echo=True, **fields))["choices"][0]["logprobs"]
    for key in ("token_logprobs", "top_logprobs"):
        assert echoed[key][4:24] == told[key]


async def test_an_echo_tells_the_same_numbers_in_every_fleet_and_company(tiny_model: Path) -> None:
    answers: list[dict[str, Any]] = []
    for roles, budget in ((DISAGGREGATED, 16), (COLOCATED, 512)):
        sections = {"prefill": {"token_budget": budget}, "colocated": {"token_budget": budget}}
        async with (
            run_fleet(tiny_model, roles, **sections) as running,
            httpx.AsyncClient(base_url=running.http_url, timeout=60) as client,
        ):
            answers.append(await ask(client, **WANTED))
            _, among_others, streamed = await asyncio.gather(
                neighbours(client), ask(client, **WANTED), ask_streamed(client, **WANTED)
            )
            assert among_others["choices"] == answers[-1]["choices"]
            assert streamed == answers[-1]["choices"][0]
            await check_an_echo_tells_what_the_answer_told(running, client)
    check(answers[0])
    assert [answer["choices"] for answer in answers] == [answers[0]["choices"]] * 2


async def test_8192_tokens_with_20_each_leave_a_worker_from_two_prompts_at_once() -> None:
    """Two megabytes each, in one turn of the engine."""
    settings = bench_settings(token_budget=2 * 8_192)
    model = replace(FAKE_MODEL, context_length=16_384)
    worker = BenchWorker("prefill", settings, num_blocks=2 * 2_048, model=model)
    async with fleet(worker) as coordinator:
        numbers = (1, 2)
        for number in numbers:
            await coordinator.submit(number, [3] * 8_192, max_tokens=1, num_prompt_logprobs=20)
        streams = [await coordinator.finished(number) for number in numbers]
    for stream in streams:
        assert [entry.logprob for entry in stream.prompt_logprobs] == [-float(p) for p in range(1, 8_192)]
        assert {len(entry.top) for entry in stream.prompt_logprobs} == {20}


async def test_the_largest_echo_reaches_a_client_and_a_larger_one_is_refused(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "wide", context_length=16_384)
    fields = {"echo": True, "logprobs": 20, "max_tokens": 2}
    async with front_door(model, num_blocks=8_192) as door:
        answer = (await door.http.post(PATH, json={"prompt": [100] * 8_192, **fields})).json()
        logprobs = answer["choices"][0]["logprobs"]
        assert [len(logprobs[key]) for key in KEYS] == [8_194] * 4
        num_tokens = MAX_PROMPT_LOGPROBS // 21 + 1
        refused = await door.http.post(PATH, json={"prompt": [100] * num_tokens, **fields})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
        await door.until_idle()


@pytest.mark.parametrize("api", ["http", "sse"])
async def test_a_stop_string_cuts_text_and_entries_alike(tiny_model: Path, api: str) -> None:
    async with front_door(tiny_model) as door:
        plain = (await door.http.post(PATH, json={"prompt": [9, 9], "max_tokens": 8, "ignore_eos": True})).json()
        text = plain["choices"][0]["text"]
        fields = {"max_tokens": 8, "ignore_eos": True, "stop": text[3:5], "logprobs": 0}
        asked = ask if api == "http" else ask_streamed
        answer = await asked(door.http, prompt=[9, 9], **fields)
        choice = answer["choices"][0] if api == "http" else answer
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == text[: text.index(text[3:5])]
        await door.until_idle()
