"""Bodies that would cost more than they are worth."""

import asyncio

import pytest

from coordinator.generation.sequence_requests import tenant_salt
from coordinator.http_api.bodies import MAX_PROMPTS
from tests.coordinator.http_api.conftest import Serve
from tests.coordinator.text_fakes import build_generator, echo_scheduler

PATH = "/v1/completions"


async def test_a_body_that_never_ends_is_given_up_at_the_requests_deadline(serve_on_socket: Serve) -> None:
    async with serve_on_socket(build_generator(scheduler := echo_scheduler(b"x"))) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nX-Request-Timeout: 0.2\r\n\r\n"
        writer.write(head.encode() + b'{"prompt": ')
        status = await asyncio.wait_for(reader.readline(), 20)
        assert b" 504 " in status
        writer.close()
        assert (await client.post(PATH, json={"prompt": "a"})).status_code == 200
    assert len(scheduler.streams) == 1


async def test_a_lone_surrogate_in_a_salt_is_no_server_error(serve: Serve) -> None:
    async with serve(build_generator(scheduler := echo_scheduler(b"x"))) as client:
        body = b'{"prompt": "a", "cache_salt": "\\ud800"}'
        answer = await client.post(PATH, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    assert scheduler.streams[0].request.cache_salt == tenant_salt("default", "\ufffd")


@pytest.mark.parametrize("prompt", ["", [1]])
async def test_a_huge_list_of_prompts_is_refused_before_it_is_taken_apart(serve: Serve, prompt: object) -> None:
    async with serve(build_generator(echo_scheduler(b"x"))) as client:
        answer = await client.post(PATH, json={"prompt": [prompt] * (MAX_PROMPTS + 1)})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


async def test_a_text_that_cannot_fit_is_refused_without_encoding_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = build_generator(echo_scheduler(b"x"))
    tokenizer = next(iter(generator.models)).tokenizer
    encoded: list[str] = []
    monkeypatch.setattr(tokenizer, "encode", lambda text, **_: encoded.append(text) or [1])
    async with serve(generator) as client:
        answer = await client.post(PATH, json={"prompt": "a" * 2_000_000})
    assert answer.status_code == 400
    assert "the context holds" in answer.json()["error"]["message"]
    assert encoded == []


async def test_curl_need_not_name_the_content_type(serve: Serve) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    async with serve(build_generator(echo_scheduler(b"x"))) as client:
        assert (await client.post(PATH, content=b'{"prompt": "a"}', headers=headers)).status_code == 200
        nonsense = await client.post(PATH, content=b"prompt=a", headers=headers)
    assert nonsense.status_code == 400
