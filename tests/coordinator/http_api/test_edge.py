import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.coordinator.http_api.conftest import Serve
from tests.coordinator.text_fakes import build_generator, echo_scheduler

PATH = "/v1/completions"
BODY = {"prompt": "a"}


async def test_the_clients_label_comes_back_and_reaches_the_sequence(serve: Serve) -> None:
    async with serve(build_generator(scheduler := echo_scheduler(b"x"))) as client:
        posts = [client.post(PATH, json=BODY, headers={"X-Request-Id": "job-1"}) for _ in range(2)]
        responses = await asyncio.gather(*posts)
        missing = await client.get("/nothing", headers={"X-Request-Id": "job-2"})
    assert [r.headers["x-request-id"] for r in responses] == ["job-1", "job-1"]
    assert [r.json()["choices"][0]["text"] for r in responses] == ["x", "x"]
    assert [s.request.label for s in scheduler.streams] == ["job-1", "job-1"]
    assert missing.headers["x-request-id"] == "job-2"


@pytest.mark.parametrize("offered", ["", "with space", "x" * 300])
async def test_a_label_is_made_where_the_client_has_no_usable_one(serve: Serve, offered: str) -> None:
    async with serve(build_generator(echo_scheduler(b"x"))) as client:
        response = await client.get("/livez", headers={"X-Request-Id": offered})
    assert len(response.headers["x-request-id"]) == 32


async def test_keys_are_asked_for_under_v1_only(serve: Serve) -> None:
    generator = build_generator(scheduler := echo_scheduler(b"x"), api_keys={"k": "acme"})
    async with serve(generator) as client:
        refused = await client.post(PATH, json=BODY)
        accepted = await client.post(PATH, json=BODY, headers={"Authorization": "Bearer k"})
        assert (await client.get("/health")).status_code == 200
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert accepted.status_code == 200
    assert scheduler.streams[0].request.tenant == "acme"


async def test_a_body_over_the_limit_is_refused_unread(serve_on_socket: Serve) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    generator = build_generator(scheduler := echo_scheduler(b"x"), max_body_bytes=1000)
    async with serve_on_socket(generator) as client:
        declared = await client.post(PATH, content=b" " * 1001)
        chunked = await client.post(PATH, content=pieces(), headers={"content-type": "application/json"})
        fits = await client.post(PATH, json=BODY)
    assert [declared.status_code, chunked.status_code, fits.status_code] == [413, 413, 200]
    assert declared.json()["error"]["code"] == chunked.json()["error"]["code"] == "payload_too_large"
    assert len(scheduler.streams) == 1


async def test_the_timeout_header_sets_the_deadline(serve: Serve) -> None:
    async with serve(build_generator(scheduler := echo_scheduler(b"x"), max_deadline_s=50)) as client:
        for seconds in ("2.5", "900"):
            await client.post(PATH, json=BODY, headers={"X-Request-Timeout": seconds})
    lifetimes = [s.request.deadline_s - s.request.arrival_s for s in scheduler.streams]
    assert lifetimes == pytest.approx([2.5, 50.0])


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "abc", "1e3", "٣"])
async def test_a_timeout_that_is_no_number_of_seconds_is_refused(serve: Serve, value: str) -> None:
    async with serve(build_generator(echo_scheduler(b"x"))) as client:
        response = await client.post(PATH, json=BODY, headers={"X-Request-Timeout": value.encode()})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Request-Timeout")
