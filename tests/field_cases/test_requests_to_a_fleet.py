"""C01, C02, C07, E03, E05 and I02 against fleets of real processes: who is refused, who runs, and that all live on."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.client.inference import Message
from pdserve.core.errors import PdserveError
from tests.support.eos_first import write_with_eos_first
from tests.support.fleet import Fleet, live_workers, run_fleet
from tests.support.tiny_models import write_tiny_llama

VOCAB, CONTEXT = 300, 128
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@asynccontextmanager
async def served(model: Path, **settings: dict[str, Any]) -> AsyncIterator[tuple[Fleet, httpx.AsyncClient]]:
    """A fleet whose processes are the same, and serve, after the test."""
    async with run_fleet(model, **settings) as fleet, httpx.AsyncClient(base_url=fleet.http_url, timeout=60) as client:
        before = {name: worker.worker.incarnation for name, worker in live_workers(await fleet.status()).items()}
        yield fleet, client
        for service in fleet.services:
            assert not service.exited.done()
            os.kill(service.pid, 0)
        now = {name: worker.worker.incarnation for name, worker in live_workers(await fleet.status()).items()}
        assert now == before
        assert len((await fleet.generate([5, 6, 7], max_tokens=3, **GREEDY)).token_ids) == 3


async def refusal(fleet: Fleet, prompt: Any, **options: Any) -> PdserveError:
    with pytest.raises(PdserveError) as caught:
        await fleet.generate(prompt, **options)
    return caught.value


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("small") / "tiny", context_length=CONTEXT)


async def test_impossible_prompts_are_refused_and_every_process_lives_on(small_model: Path) -> None:
    """C01, C02 and C07 over HTTP, chat and gRPC."""
    async with served(small_model, coordinator={"default_max_tokens": 8}) as (fleet, client):
        await check_empty_prompts(fleet, client)
        await check_token_ids(fleet, client)
        await check_max_tokens(fleet, client)
        await check_max_tokens_of_a_chat(client)


async def error_of(client: httpx.AsyncClient, path: str = COMPLETIONS, **body: object) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]  # type: ignore[no-any-return]


async def check_empty_prompts(fleet: Fleet, client: httpx.AsyncClient) -> None:
    for prompt in ("", [""], []):
        assert (await error_of(client, prompt=prompt))["param"].startswith("prompt")
    assert (await error_of(client, CHAT, messages=[]))["param"] == "messages"
    for nothing in ("", []):
        assert (await refusal(fleet, nothing)).codes.grpc_status == "INVALID_ARGUMENT"
    body = {"messages": [{"role": "user", "content": ""}], "max_tokens": 2}
    assert (await client.post(CHAT, json=body)).status_code == 200  # the template makes ids of it
    assert len((await fleet.generate([Message("user", "")], max_tokens=2, **GREEDY)).token_ids) == 2
    assert (await client.post(COMPLETIONS, json={"prompt": [7], "max_tokens": 2})).status_code == 200
    assert len((await fleet.generate([7], max_tokens=2, **GREEDY)).token_ids) == 2


async def check_token_ids(fleet: Fleet, client: httpx.AsyncClient) -> None:
    """Ids from the tokenizer's end to the embedding's are fine (docs/api.md): here there is none between."""
    bad: list[tuple[list[Any], str]] = [
        ([-1], "prompt[0]"),
        ([VOCAB], "prompt[0]"),
        ([5, 6, VOCAB], "prompt[2]"),
        ([2**63], "prompt[0]"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        ([1, "1"], "prompt[1]"),
        ([[1], [-1]], "prompt[1][0]"),
    ]
    for prompt, param in bad:
        assert (await error_of(client, prompt=prompt))["param"] == param
    assert (await refusal(fleet, [5, VOCAB])).param == "prompt[1]"
    for unsendable in ([-1], [2**63]):
        assert (await refusal(fleet, unsendable)).codes.grpc_status == "INVALID_ARGUMENT"
    assert (await client.post(COMPLETIONS, json={"prompt": [VOCAB - 1], "max_tokens": 2})).status_code == 200
    assert len((await fleet.generate([VOCAB - 1], max_tokens=2, **GREEDY)).token_ids) == 2


async def check_max_tokens(fleet: Fleet, client: httpx.AsyncClient) -> None:
    async def tokens(length: int, **options: object) -> tuple[str, int]:
        body = {"prompt": [7] * length, **GREEDY, **options}
        answer = (await client.post(COMPLETIONS, json=body)).json()
        output = await fleet.generate([7] * length, **GREEDY, **options)
        found = (output.finished.finish_reason.value, len(output.token_ids))
        assert found == (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"])
        return found

    assert await tokens(100) == ("length", 8)
    assert await tokens(100, max_tokens=None) == ("length", 8)
    assert await tokens(CONTEXT - 3) == ("length", 3)
    assert await tokens(100, max_tokens=CONTEXT - 100) == ("length", CONTEXT - 100)
    assert await tokens(CONTEXT - 1, max_tokens=1) == ("length", 1)
    for length, asked in ((100, CONTEXT - 99), (100, 10**9), (CONTEXT, 1), (CONTEXT + 1, 1)):
        http = await error_of(client, prompt=[7] * length, max_tokens=asked)
        grpc = await refusal(fleet, [7] * length, max_tokens=asked)
        assert (http["message"], http["param"]) == (grpc.message, grpc.param)
        for number in {length, CONTEXT, asked} - {1}:
            assert str(number) in http["message"]
    for asked in (0, -1):
        assert (await error_of(client, prompt=[7], max_tokens=asked))["param"] == "max_tokens"
        assert (await refusal(fleet, [7], max_tokens=asked)).codes.grpc_status == "INVALID_ARGUMENT"


async def check_max_tokens_of_a_chat(client: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **GREEDY}
    answer = (await client.post(CHAT, json=body)).json()
    assert answer["usage"]["completion_tokens"] == 8
    length = answer["usage"]["prompt_tokens"]
    exact = (await client.post(CHAT, json={**body, "max_tokens": CONTEXT - length})).json()
    assert exact["choices"][0]["finish_reason"] == "length"
    assert exact["usage"]["completion_tokens"] == CONTEXT - length
    for asked in (CONTEXT - length + 1, 10**9, 0, -1):
        error = await error_of(client, CHAT, **body, max_tokens=asked)
        assert error["param"] == "max_tokens"
        assert asked <= 0 or all(str(number) in error["message"] for number in (length, CONTEXT, asked))


async def test_first_tokens_that_end_the_answer_leave_no_block_and_send_no_kv(tmp_path: Path) -> None:
    """E05: EOS, ignored EOS, a stop id and a stop string as the very first token of a real model."""
    prompt = [5, 6, 7, 8]
    eos = write_with_eos_first(tmp_path / "tiny", prompt)
    async with served(tmp_path / "tiny") as (fleet, client):
        greedy = {"temperature": 0.0}
        output = await fleet.generate(prompt, max_tokens=5, **greedy)
        assert (output.text, output.token_ids, output.finished.finish_reason.value) == ("", (eos,), "stop")
        stream = await client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 5, "stream": True, **greedy})
        assert '"finish_reason":"stop"' in stream.text
        assert stream.text.endswith("data: [DONE]\n\n")
        one = await fleet.generate(prompt, max_tokens=1, **GREEDY)
        assert (one.token_ids, one.finished.finish_reason.value) == ((eos,), "length")
        status = await fleet.until_idle()
        assert sum(w.load.totals.transferred_bytes for w in live_workers(status).values()) == 0
        ignored = await fleet.generate(prompt, max_tokens=5, **GREEDY)
        assert (ignored.token_ids[0], len(ignored.token_ids)) == (eos, 5)
        other = [9, 10, 11]
        plain = await fleet.generate(other, max_tokens=1, **GREEDY)
        stopped = await fleet.generate(other, max_tokens=200, stop=[plain.text[:1]], **GREEDY)
        assert (stopped.text, stopped.finished.finish_reason.value, len(stopped.token_ids)) == ("", "stop", 1)
        by_id = await fleet.generate(other, max_tokens=200, stop_token_ids=plain.token_ids, **greedy)
        assert (by_id.text, by_id.finished.finish_reason.value) == ("", "stop")
        await fleet.until_idle()


async def test_lifetime_reservations_of_a_pool_of_100_blocks(tiny_model: Path) -> None:
    """E03: 60 and 60 take turns, 50 and 50 run together, 101 is refused, an early stop gives its blocks back."""
    async with served(tiny_model, worker={"num_blocks": 100, "kernels": "torch"}) as (fleet, client):

        def ask(num_blocks: int, seed: int, **options: Any) -> "asyncio.Task[Any]":
            fields = {"max_tokens": num_blocks * 16 - 100, **GREEDY, **options}
            return asyncio.create_task(fleet.generate([seed] * 100, **fields))

        turns = [ask(60, 5), ask(60, 6)]
        await fleet.until(lambda s: reserved(s) == 60 and any(q.num_requests == 1 for q in s.queues))
        assert [len(output.token_ids) for output in await asyncio.gather(*turns)] == [860, 860]
        together = [ask(50, 7), ask(50, 8)]
        await fleet.until(lambda s: reserved(s) == 100)
        assert [len(output.token_ids) for output in await asyncio.gather(*together)] == [700, 700]
        body = {"prompt": [7] * 100, "max_tokens": 101 * 16 - 100}
        assert (await error_of(client, **body))["code"] == "never_fits"
        early = await ask(100, 7, stop_token_ids=[(await together[0]).token_ids[5]])
        assert early.finished.finish_reason.value == "stop"
        status = await fleet.until_idle()
        assert all(worker.load.totals.preemptions == 0 for worker in live_workers(status).values())


def reserved(status: Any) -> int:
    return int(live_workers(status)["decode-0"].load.num_reserved_blocks)


@pytest.mark.parametrize("small_pool", ["prefill-0", "decode-0"])
async def test_one_block_too_many_in_either_pool_is_refused_and_the_next_runs(
    tiny_model: Path, small_pool: str
) -> None:
    """I02: U blocks run, U + 1 is 400 at once, also for what is sent right behind it."""
    fleet = Fleet(tiny_model, {})
    try:
        await fleet.start_coordinator()
        for name in ("prefill-0", "decode-0"):
            fleet.launch_worker(name[:-2], name, num_blocks=4 if name == small_pool else 100)
        await fleet.until(lambda s: sorted(w.load.num_usable_blocks for w in live_workers(s).values()) == [4, 100])
        fits = 64 if small_pool == "prefill-0" else 61  # and three tokens more live in the decode pool
        too_long = asyncio.create_task(refusal(fleet, [7] * (fits + 1), max_tokens=3, **GREEDY))
        behind = asyncio.create_task(fleet.generate([7] * 5, max_tokens=3, **GREEDY))
        assert (await too_long).reason.value == "never_fits"
        assert len((await behind).token_ids) == 3
        async with httpx.AsyncClient(base_url=fleet.http_url, timeout=60) as client:
            assert (await error_of(client, prompt=[7] * (fits + 1), max_tokens=3))["code"] == "never_fits"
        assert len((await fleet.generate([7] * fits, max_tokens=3, **GREEDY)).token_ids) == 3
        await fleet.until_idle()
        assert set(await fleet.stop()) == {0}
    finally:
        await fleet.kill()
