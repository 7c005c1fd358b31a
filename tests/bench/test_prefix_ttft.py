import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from pdserve_bench.prefix_ttft import TAIL_TOKENS, FirstToken, TtftGain, measure_ttft, ttft_table

BLOCK = 16


class FakeServer(ThreadingHTTPServer):
    """Streams two tokens to everybody; remembers prompts, and so knows what a cache would have found."""

    caching = True
    refusing = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.prompts: list[tuple[int, ...]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def num_cached(self, prompt: tuple[int, ...]) -> int:
        longest = max((_shared(prompt, other) for other in self.prompts), default=0)
        self.prompts.append(prompt)
        return longest // BLOCK * BLOCK if self.caching else 0


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, body["stream"], body["max_tokens"]) == ("/v1/completions", True, 2)
        self.send_response(503 if self.server.refusing else 200)
        self.end_headers()
        details = {"cached_tokens": self.server.num_cached(tuple(body["prompt"]))}
        for event in ({"choices": []}, {"choices": []}, {"choices": [], "usage": {"prompt_tokens_details": details}}):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_every_second_prompt_shares_all_but_its_tail_with_the_one_before(server: FakeServer) -> None:
    gain = measure_ttft(server.url, 100, repeats=3, seed=1)
    assert (len(gain.cold), len(gain.warm)) == (3, 3)
    assert [one.num_cached_tokens for one in gain.warm] == [(100 - TAIL_TOKENS) // BLOCK * BLOCK] * 3
    assert all(one.ttft_s > 0 for one in (*gain.cold, *gain.warm))
    assert {len(prompt) for prompt in server.prompts} == {100}
    for cold, warm in zip(server.prompts[::2], server.prompts[1::2], strict=True):
        assert _shared(cold, warm) >= 100 - TAIL_TOKENS
    assert len(set(server.prompts)) == 8


def test_a_server_that_caches_nothing_is_no_result(server: FakeServer) -> None:
    server.caching = False
    with pytest.raises(RuntimeError, match="prefix_cache"):
        measure_ttft(server.url, 100, repeats=1)


def test_prompts_that_were_sent_before_are_no_cold_ones(server: FakeServer) -> None:
    measure_ttft(server.url, 100, repeats=1, seed=1)
    with pytest.raises(RuntimeError, match="nobody had sent"):
        measure_ttft(server.url, 100, repeats=1, seed=1)


def test_a_refusal_is_told(server: FakeServer) -> None:
    server.refusing = True
    with pytest.raises(RuntimeError, match="503"):
        measure_ttft(server.url, 100, repeats=1)


def test_medians_and_their_ratio() -> None:
    cold = tuple(FirstToken(seconds, 0) for seconds in (0.3, 0.1, 0.2))
    warm = tuple(FirstToken(seconds, 64) for seconds in (0.05, 0.9, 0.04))
    gain = TtftGain(100, cold, warm)
    assert (gain.cold_s, gain.warm_s, gain.ratio) == (0.2, 0.05, pytest.approx(4.0))
    console = Console(width=120)
    with console.capture() as capture:
        console.print(ttft_table([gain]))
    assert "200.0 (100.0–300.0)" in capture.get()
    assert "4.00" in capture.get()
