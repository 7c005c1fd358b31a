"""What a cached prefix saves: time to first token over HTTP, cold and warm in turns. Starts no fleet."""

import http.client
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

from rich.table import Table

from pdserve_bench.report import new_table

TAIL_TOKENS = 32
"""What each prompt has of its own behind the prefix that two of them share."""

TOKEN_IDS = (3, 258)
"""From the first to the last id in prompts: every model has them, and none is special in those that we know."""

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One prompt's time to first token, as a client sees it, and how many of the prompt's tokens were cached."""

    ttft_s: float
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class TtftGain:
    """Pairs of prompts of one length that share all but their tails; the first of each pair has a new prefix."""

    num_tokens: int
    cold: tuple[FirstToken, ...]
    warm: tuple[FirstToken, ...]

    @property
    def cold_s(self) -> float:
        return statistics.median(one.ttft_s for one in self.cold)

    @property
    def warm_s(self) -> float:
        return statistics.median(one.ttft_s for one in self.warm)

    @property
    def ratio(self) -> float:
        """Cold over warm: how many times sooner the first token comes."""
        return self.cold_s / self.warm_s

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "cold_s": self.cold_s, "warm_s": self.warm_s, "ratio": self.ratio}


def measure_ttft(url: str, num_tokens: int, repeats: int, seed: int | None = None) -> TtftGain:
    """`repeats` pairs of prompts, after one pair that only warms the server up.

    Raises:
        RuntimeError: the server refused, or a first prompt was cached, or a second one was not.
    """
    rng = random.Random(seed)
    cold: list[FirstToken] = []
    warm: list[FirstToken] = []
    for _ in range(repeats + 1):
        prefix = _random_ids(rng, num_tokens - TAIL_TOKENS)
        for answers in (cold, warm):
            answers.append(ask(url, prefix + _random_ids(rng, TAIL_TOKENS)))
    if any(one.num_cached_tokens for one in cold):
        raise RuntimeError("a prompt that nobody had sent was cached")
    if not all(one.num_cached_tokens for one in warm):
        raise RuntimeError("a prefix sent twice was not cached: is worker.prefix_cache on, and its pool large enough?")
    return TtftGain(num_tokens, tuple(cold[1:]), tuple(warm[1:]))


def ask(url: str, token_ids: Sequence[int]) -> FirstToken:
    """Stream two tokens: the second shows that the first was sent as soon as it was there.

    Raises:
        RuntimeError: the server refused.
    """
    parts = urlsplit(url)
    body = {"prompt": token_ids, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=TIMEOUT_S)
    try:
        connection.connect()
        begin_s = time.perf_counter()
        connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        first = response.readline()
        ttft_s = time.perf_counter() - begin_s
        rest = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"{url} answered {response.status}: {(first + rest).decode(errors='replace')}")
    return FirstToken(ttft_s, _cached_tokens(rest.decode()))


def ttft_table(gains: Sequence[TtftGain]) -> Table:
    table = new_table("Time to first token", (), ("prompt", "cached", "cold ms", "warm ms", "times sooner"))
    for gain in gains:
        cached = statistics.median(one.num_cached_tokens for one in gain.warm)
        times = (_milliseconds(gain.cold), _milliseconds(gain.warm))
        table.add_row(str(gain.num_tokens), f"{cached:g}", *times, f"{gain.ratio:.2f}")
    return table


def _milliseconds(answers: Sequence[FirstToken]) -> str:
    times = sorted(one.ttft_s * 1000 for one in answers)
    return f"{statistics.median(times):.1f} ({times[0]:.1f}–{times[-1]:.1f})"


def _random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(*TOKEN_IDS) for _ in range(count)]


def _cached_tokens(events: str) -> int:
    """From the usage, which the last event but [DONE] carries."""
    *_, last, _ = [event for event in events.split("\n\n") if event.strip()]
    usage = json.loads(last.strip().removeprefix("data: "))["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])
