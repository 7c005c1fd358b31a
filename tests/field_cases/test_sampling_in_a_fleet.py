"""B02, B03 and B06 in a fleet of real processes: bad values cost nobody anything, good ones do what they say."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.core.errors import ErrorReason, PdserveError
from tests.field_cases.test_logprobs import ask, strict
from tests.field_cases.test_requests_to_a_fleet import CHAT, COMPLETIONS, served
from tests.support.fleet import Fleet

VOCAB = 300
PATHS = {COMPLETIONS: '"prompt": "a"', CHAT: '"messages": [{"role": "user", "content": "a"}]'}
"""And what each asks for, as part of a JSON object."""
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
OUT_OF_RANGE: dict[str, tuple[float, ...]] = {
    "temperature": (-1, 101),
    "top_p": (-1, 0, 1.5),
    "min_p": (-0.1, 1.1),
    "presence_penalty": (-2.1, 2.1),
    "frequency_penalty": (-2.1, 2.1),
    "repetition_penalty": (0, -1),
}
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
BAD_IDS: list[dict[str, Any]] = [
    {"logit_bias": {str(VOCAB): 5}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"abc": 1}},
    {"stop_token_ids": [VOCAB]},
    {"stop_token_ids": [-1]},
]


async def check_refused(client: httpx.AsyncClient, body: str, param: str) -> None:
    """A strict JSON error that names the field, on both endpoints."""
    for path, prompt in PATHS.items():
        content = f"{{{prompt}, {body}}}"
        answer = await client.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, (body, answer.text)
        assert strict(answer.content)["error"]["param"].partition("[")[0] == param, answer.text


async def check_numbers_over_http(client: httpx.AsyncClient) -> None:
    """FIELD_CASES B02."""
    for name in (*NUMBERS, "seed"):
        for value in NOT_FINITE:
            await check_refused(client, f'"{name}": {value}', name)
            await check_refused(client, f'"{name}": "{value}"', name)
    for value in NOT_FINITE:
        await check_refused(client, f'"logit_bias": {{"5": {value}}}', "logit_bias")
        await check_refused(client, f'"logit_bias": {{"5": "{value}"}}', "logit_bias")
    for name, values in OUT_OF_RANGE.items():
        for value in values:
            await check_refused(client, f'"{name}": {value}', name)
    for value in (-1, 2**64):
        await check_refused(client, f'"seed": {value}', "seed")


async def check_ids_over_http(client: httpx.AsyncClient) -> None:
    """FIELD_CASES B03: alone and with `min_tokens`, which would mask these ids."""
    for fields in BAD_IDS:
        (param,) = fields
        for more in ({}, {"min_tokens": 5}):
            await check_refused(client, json.dumps({**fields, **more})[1:-1], param)


async def check_over_grpc(fleet: Fleet) -> None:
    options: list[dict[str, Any]] = [{name: value} for name, values in OUT_OF_RANGE.items() for value in values]
    options += [{name: value} for name in NUMBERS for value in (math.nan, math.inf, -math.inf)]
    options += [{"logit_bias": {5: value}} for value in (math.nan, math.inf, 101.0)]
    options += [{"logit_bias": {i: 1.0}} for i in (-1, VOCAB)] + [{"stop_token_ids": [i]} for i in (-1, VOCAB)]
    for fields in options:
        with pytest.raises(PdserveError) as caught:
            await fleet.generate([5, 6], max_tokens=8, min_tokens=5, **fields)
        assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
        assert caught.value.param.partition("[")[0] in fields


async def test_bad_values_are_refused_by_name_and_a_running_stream_goes_on(tiny_model: Path) -> None:
    """B02 and B03. `served` holds the processes to be the same afterwards."""
    fields: dict[str, Any] = {"max_tokens": 400, "seed": 9, "ignore_eos": True, "logprobs": 1}
    async with served(tiny_model) as (fleet, client):
        alone = await fleet.generate([8, 9, 10], **fields)
        running = asyncio.create_task(fleet.generate([8, 9, 10], **fields))
        await check_numbers_over_http(client)
        await check_ids_over_http(client)
        await check_over_grpc(fleet)
        assert (await running).token_ids == alone.token_ids


async def test_good_values_do_what_they_say(tiny_model: Path) -> None:
    """The rest of B03, and of B06."""
    async with served(tiny_model) as (fleet, client):
        await check_biases(fleet)
        await check_choices_of_one_seed(fleet, client)


async def check_biases(fleet: Fleet) -> None:
    sampled: dict[str, Any] = {"max_tokens": 200, "seed": 5, "ignore_eos": True}
    plain = await fleet.generate([5, 6], **sampled)
    banned = max(set(plain.token_ids), key=plain.token_ids.count)
    without = await fleet.generate([5, 6], **sampled, logit_bias={banned: -100.0})
    assert len(without.token_ids) == 200
    assert banned not in without.token_ids
    only = await fleet.generate([5, 6], **sampled, logit_bias={banned: 100.0})
    assert set(only.token_ids) == {banned}


async def check_choices_of_one_seed(fleet: Fleet, client: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"prompt": [5, 6, 7], "n": 3, "max_tokens": 64, "ignore_eos": True, "temperature": 0.8}
    first, again = [[c["text"] for c in (await ask(client, **body, seed=42))["choices"]] for _ in range(2)]
    assert first == again
    assert len(set(first)) > 1
    unseeded = [await fleet.generate([5, 6, 7], max_tokens=64, ignore_eos=True) for _ in range(2)]
    assert unseeded[0].token_ids != unseeded[1].token_ids
