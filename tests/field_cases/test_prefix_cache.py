"""F01, F03 and F04 in fleets of real processes: who shares cached prefixes, what moves, and that no output changes."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.client.client import AsyncClient
from pdserve.client.inference import Finished, GenerateOptions
from tests.support.fleet import COLOCATED, DISAGGREGATED, Fleet, Output, live_workers, run_fleet

BLOCK = 16
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 16, "logprobs": 5}
TOPOLOGIES = pytest.mark.parametrize("roles", [DISAGGREGATED, COLOCATED], ids=["apart", "colocated"])


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng((seed, length)).integers(3, 300, length)]


@asynccontextmanager
async def served(model: Path, roles: Iterable[str], **settings: dict[str, Any]) -> AsyncIterator[Fleet]:
    """A fleet with small blocks and chunks."""
    sections: dict[str, dict[str, Any]] = {
        "worker": {"block_size": BLOCK, "num_blocks": 512},
        "prefill": {"token_budget": 32},
        "colocated": {"token_budget": 32},
    }
    for name, values in settings.items():
        sections[name] = {**sections.get(name, {}), **values}
    async with run_fleet(model, roles, **sections) as fleet:
        yield fleet


async def ask(fleet: Fleet, token_ids: list[int], salt: str = "", **options: Any) -> tuple[Output, int]:
    """A greedy answer, and how many of the prompt's tokens were cached."""
    output = await fleet.generate(token_ids, cache_salt=salt, **{**GREEDY, **options})
    return output, output.finished.usage.cached_tokens


def num_shareable(length: int) -> int:
    """Tokens of the whole blocks that leave at least one token to compute."""
    return (length - 1) // BLOCK * BLOCK


@TOPOLOGIES
async def test_hits_change_no_output_and_stay_within_their_salt(tiny_model: Path, roles: tuple[str, ...]) -> None:
    async with served(tiny_model, roles) as fleet, httpx.AsyncClient(base_url=fleet.http_url, timeout=60) as client:
        await check_tokens(fleet)
        await check_logprobs(client)
        await check_salts(fleet, client)
        await check_usage(client)
        await check_metrics(fleet, client)


async def check_tokens(fleet: Fleet) -> None:
    """F04: lengths around block edges, a whole prompt cached, alone and in a batch with cold ones."""
    cold: dict[int, Output] = {}
    for length in (BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1, 4 * BLOCK, 100):
        cold[length], num_cached = await ask(fleet, prompt(length))
        assert num_cached == 0
        for _ in range(2):
            warm, num_cached = await ask(fleet, prompt(length))
            assert num_cached == num_shareable(length) < length
            assert (warm.token_ids, warm.text) == (cold[length].token_ids, cold[length].text)
    mixed = [(length, salt) for length in cold for salt in ("", "mixed")]
    answers = await asyncio.gather(*(ask(fleet, prompt(length), salt) for length, salt in mixed))
    for (length, salt), (output, num_cached) in zip(mixed, answers, strict=True):
        assert num_cached == (0 if salt else num_shareable(length))
        assert output.token_ids == cold[length].token_ids


async def check_logprobs(client: httpx.AsyncClient) -> None:
    """F04, to the last bit; the logprobs of a prompt's own tokens are computed anew, whatever is cached."""

    async def choice(length: int, **fields: Any) -> tuple[dict[str, Any], int]:
        body = {"prompt": prompt(length, 1), "max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": 5}
        answer = (await client.post("/v1/completions", json={**body, **fields})).json()
        return answer["choices"][0], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    for length in (BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1):
        cold, none_cached = await choice(length)
        warm, num_cached = await choice(length)
        assert (none_cached, num_cached) == (0, num_shareable(length))
        assert warm["logprobs"] == cold["logprobs"]
        echoed, of_echo = await choice(length, echo=True)
        echoed_cold, _ = await choice(length, echo=True, cache_salt="another")
        assert of_echo == 0
        assert echoed["logprobs"] == echoed_cold["logprobs"]


async def check_salts(fleet: Fleet, client: httpx.AsyncClient) -> None:
    """F01 over gRPC and HTTP: nothing across groups, something within each, wherever it was asked."""
    shared = prompt(50, 2)
    first, _ = await ask(fleet, shared)
    for salt in ("X", "Y", "model", '["default", ""]', '["default", "X"]'):
        cold, num_cached = await ask(fleet, shared, salt)
        assert num_cached == 0
        assert cold.token_ids == first.token_ids
    for salt in ("", "X", "Y"):
        warm, num_cached = await ask(fleet, shared, salt)
        assert num_cached == num_shareable(50)
        assert warm.token_ids == first.token_ids
        assert await cached_over_http(client, shared, cache_salt=salt or None) == num_shareable(50)
    assert await cached_over_http(client, shared, cache_salt="Z") == 0
    assert (await ask(fleet, shared, "Z"))[1] == num_shareable(50)


async def check_metrics(fleet: Fleet, client: httpx.AsyncClient) -> None:
    """Tokens are counted where they were looked up; kept blocks are there, and are not in use."""
    status = await fleet.until_idle()
    text = (await client.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    for name, worker in live_workers(status).items():
        found = {sample.name: sample.value for sample in samples if sample.labels.get("worker") == name}
        totals = worker.load.totals
        assert found["pdserve:prefix_cache_queries_total"] == totals.prefix_queries > totals.prefix_hits > 0
        assert found["pdserve:prefix_cache_hits_total"] == totals.prefix_hits
        assert found["pdserve:kv_blocks_cached"] == worker.load.num_cached_blocks > 0
        assert found["pdserve:kv_cache_usage_perc"] == 0


async def test_tenants_share_nothing(tiny_model: Path) -> None:
    """F01: equal salts of two tenants are two salts; two keys of one tenant are one."""
    keys = {"key-a": "a", "key-a2": "a", "key-b": "b"}
    shared = prompt(50)
    async with served(tiny_model, COLOCATED, coordinator={"api_keys": keys}) as fleet:
        seen: list[int] = []
        for key in ("key-a", "key-b", "key-a2"):
            headers = {"Authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(base_url=fleet.http_url, timeout=60, headers=headers) as client:
                seen += [await cached_over_http(client, shared), await cached_over_http(client, shared, cache_salt="s")]
        assert seen == [0, 0, 0, 0, num_shareable(50), num_shareable(50)]
        async with AsyncClient(fleet.grpc_address, api_key="key-b") as of_b:
            events = [event async for event in of_b.generate(shared, GenerateOptions(max_tokens=2, cache_salt="s"))]
        (end,) = [event for event in events if isinstance(event, Finished)]
        assert end.usage.cached_tokens == num_shareable(50)


async def cached_over_http(client: httpx.AsyncClient, token_ids: list[int], **fields: Any) -> int:
    body = {"prompt": token_ids, "max_tokens": 2, **fields}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def check_usage(client: httpx.AsyncClient) -> None:
    """Streamed and whole, three choices and one prompt."""
    messages = [{"role": "user", "content": "the same long question, " * 8}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": prompt(70, 3), "max_tokens": 2, "n": 3}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 2, "n": 3}),
    ]
    for path, body in bodies:
        told = [await usage(client, path, {**body, "stream": stream}) for stream in (False, True, False)]
        cached = [answer["prompt_tokens_details"]["cached_tokens"] for answer in told]
        length = told[0]["prompt_tokens"]
        assert cached == [0, num_shareable(length), num_shareable(length)]


async def usage(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The last one of a stream, or an answer's own."""
    if not body["stream"]:
        return dict((await client.post(path, json=body)).json()["usage"])
    text = (await client.post(path, json={**body, "stream_options": {"include_usage": True}})).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line[6:7] == "{"]
    return dict(events[-1]["usage"])


async def test_only_what_decode_lacks_is_transferred(tiny_model: Path) -> None:
    """F03: prefill's and decode's keys are equal, though each makes its own in its own process."""
    async with served(tiny_model, DISAGGREGATED) as fleet:
        block_bytes = await moved_by(fleet, prompt(BLOCK - 1))  # one block, and it is not full
        for length in (2 * BLOCK, 3 * BLOCK - 1, 100):
            num_blocks = -(-length // BLOCK)
            assert await moved_by(fleet, prompt(length)) == num_blocks * block_bytes
            num_known = length // BLOCK  # decode needs no token to be left over
            assert await moved_by(fleet, prompt(length)) == (num_blocks - num_known) * block_bytes
            longer = prompt(length) + prompt(40)
            num_blocks = -(-len(longer) // BLOCK)
            assert await moved_by(fleet, longer) == (num_blocks - num_known) * block_bytes
        loads = {name: worker.load for name, worker in live_workers(await fleet.status()).items()}
        assert loads["prefill-0"].totals.prefix_hits > 0
        assert loads["decode-0"].totals.prefix_hits > 0


async def moved_by(fleet: Fleet, token_ids: list[int]) -> int:
    """Bytes of KV that one request made cross."""
    before = moved(await fleet.status())
    await ask(fleet, token_ids)
    return moved(await fleet.until_idle()) - before


def moved(status: Any) -> int:
    return sum(worker.load.totals.transferred_bytes for worker in live_workers(status).values())


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_restarted_worker_begins_cold_and_its_peer_stays_warm(tiny_model: Path, role: str) -> None:
    """F03: what one of the two knows never stands for what the other knows."""
    async with served(tiny_model, DISAGGREGATED) as fleet:
        cold, _ = await ask(fleet, prompt(3 * BLOCK))
        whole = moved(await fleet.until_idle())
        assert await fleet.service(f"{role}-0").stop() == 0
        await fleet.launch_worker(role, f"{role}-0").info()
        await fleet.until(lambda status: len(live_workers(status)) == 2)
        before = moved(await fleet.until_idle())
        again, num_cached = await ask(fleet, prompt(3 * BLOCK))
        assert again.token_ids == cold.token_ids
        assert num_cached == (0 if role == "prefill" else num_shareable(3 * BLOCK))
        assert moved(await fleet.until_idle()) - before == (0 if role == "prefill" else whole)
        warm, num_cached = await ask(fleet, prompt(3 * BLOCK))
        assert (warm.token_ids, num_cached) == (cold.token_ids, num_shareable(3 * BLOCK))


async def test_a_conversation_goes_on_from_its_answers_where_they_were_decoded(tiny_model: Path) -> None:
    async with served(tiny_model, COLOCATED) as fleet:
        history = prompt(50)
        for _ in range(3):
            answer, _ = await ask(fleet, history)
            history = [*history, *answer.token_ids, *prompt(5)]
            _, num_cached = await ask(fleet, history, max_tokens=1)
            # The last sampled token was never computed; everything before it was.
            assert num_cached >= (len(history) - 5 - 1) // BLOCK * BLOCK


@TOPOLOGIES
async def test_a_full_pool_evicts_and_refuses_nobody(tiny_model: Path, roles: tuple[str, ...]) -> None:
    """F02: many prompts through a pool of 24 blocks, several at a time; blocks in use stay what they are."""
    async with served(tiny_model, roles, worker={"num_blocks": 24}) as fleet:
        prompts = [prompt(40 + 17 * (seed % 5), seed) for seed in range(20)]
        cold = await asyncio.gather(*(ask(fleet, token_ids) for token_ids in prompts))
        again = await asyncio.gather(*(ask(fleet, token_ids) for token_ids in prompts))
        assert [output.token_ids for output, _ in again] == [output.token_ids for output, _ in cold]
        for token_ids, (output, _) in list(zip(prompts, cold, strict=True))[:4]:
            alone, _ = await ask(fleet, token_ids, "cold")
            assert alone.token_ids == output.token_ids
        status = await fleet.until_idle()
        for worker in live_workers(status).values():
            assert 0 < worker.load.num_cached_blocks <= 24
            assert worker.load.num_cached_tokens == worker.load.num_cached_blocks * BLOCK


@TOPOLOGIES
async def test_switched_off_nothing_is_cached(tiny_model: Path, roles: tuple[str, ...]) -> None:
    async with served(tiny_model, roles, worker={"prefix_cache": False}) as fleet:
        answers = [await ask(fleet, prompt(100)) for _ in range(2)]
        assert [num_cached for _, num_cached in answers] == [0, 0]
        assert answers[0][0].token_ids == answers[1][0].token_ids
        status = await fleet.until_idle()
        for worker in live_workers(status).values():
            assert worker.load.num_cached_blocks == worker.load.totals.prefix_queries == 0
