"""H04: whatever clients send, /metrics grows by next to nothing and repeats none of it."""

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.support.front_door import FrontDoor, front_door
from tests.support.scripted_worker import MODEL

NUM_REQUESTS = 1000
MAX_NEW_SERIES = 5
MARK = "canary"
"""Part of everything that a client makes up here."""


async def scrape(door: FrontDoor) -> tuple[set[str], str]:
    """The series exported, without their values, and the whole text."""
    text = (await door.http.get("/metrics")).text
    return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}, text


async def many(ask: Callable[[str], Awaitable[int]], status: int) -> None:
    """Ask a thousand times, each time with a text that never was before."""
    for _ in range(0, NUM_REQUESTS, 50):
        answers = await asyncio.gather(*(ask(f"{MARK}-{secrets.token_hex(8)}") for _ in range(50)))
        assert answers == [status] * 50


async def test_random_paths_model_names_and_request_ids_make_no_series(tiny_model: Path) -> None:
    rng = random.Random(4)

    async with front_door(tiny_model) as door:

        async def path(text: str) -> int:
            prefix = rng.choice(("", "v1/", "v1/models/", "metrics/", "health/", "v1/completions/"))
            return (await door.http.request(rng.choice(("GET", "POST")), f"/{prefix}{text}")).status_code

        async def model(text: str) -> int:
            body = {"model": text, "prompt": "hello", "max_tokens": 2}
            return (await door.http.post("/v1/completions", json=body)).status_code

        async def request_id(text: str) -> int:
            body = {"model": MODEL.name, "prompt": text, "max_tokens": 2, "user": text, "cache_salt": text}
            headers = {"X-Request-Id": text, "User-Agent": text}
            return (await door.http.post("/v1/completions", json=body, headers=headers)).status_code

        assert await request_id(MARK) == 200  # the series that any good answer makes
        before, _ = await scrape(door)
        await many(model, 404)
        await many(request_id, 200)
        for _ in range(0, NUM_REQUESTS, 50):
            assert {404, 405} >= set(await asyncio.gather(*(path(f"{MARK}-{rng.random()}") for _ in range(50))))
        await door.until_idle()
        after, text = await scrape(door)
        assert len(after) - len(before) <= MAX_NEW_SERIES, sorted(after - before)
        assert MARK not in text
