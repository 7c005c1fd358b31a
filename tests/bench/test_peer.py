"""The comparison with a peer: its arithmetic, its client, its turns, and one run of the command on fake servers."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

import pdserve_bench.peer.measure as measure_module
from pdserve_bench.peer.cells import CELLS, MIN_RATIO, MIN_RATIO_BFLOAT16, Cell, Comparison, Sample, sample, targets
from pdserve_bench.peer.client import Endpoint, ServerError, Timing, complete, get_json
from pdserve_bench.peer.measure import FIRST_ORDINARY_ID, Effort, RandomPrompts, compare, run_cell
from pdserve_bench.peer.server import Gone, ServerSpec, running

FAKE_SERVER = str(Path(__file__).with_name("fake_openai_server.py"))
DECODE, PREFILL = Cell("decode", 5, 4, 2, 6), Cell("prefill", 7, 1, 1, 2)
TIMEOUT_S = 60.0


def rated(rate: float, foreign_cores: float = 0.0) -> Sample:
    return Sample(rate, 10.0, 2.0, 0.1, foreign_cores)


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def fake_spec(name: str = "ours") -> ServerSpec:
    port = free_port()
    return ServerSpec(name, f"{sys.executable} {FAKE_SERVER} {port}", f"http://127.0.0.1:{port}")


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_a_sample_counts_what_its_cell_is_about() -> None:
    timings = [Timing(1.0, (1.5, 1.75, 2.25), 4), Timing(2.0, (2.25, 3.25), 4)]
    decode = sample(DECODE, timings, wall_s=4.0, client_s=1.0)
    assert decode == Sample(rate=2.0, ttft_ms=375.0, itl_ms=500.0, client_cores=0.25)
    prefill = sample(PREFILL, [Timing(0.0, (0.5,), 1), Timing(0.5, (1.5, 1.6), 1)], wall_s=2.0, client_s=0.0)
    assert prefill == Sample(rate=7.0, ttft_ms=750.0, itl_ms=None, client_cores=0.0)


def test_ratios_are_of_neighbours_and_their_median_counts() -> None:
    """However the machine's speed changes from repeat to repeat: here the ratio of the medians would be 2."""
    ours, peer = (rated(300.0), rated(90.0), rated(160.0)), (rated(200.0), rated(50.0), rated(80.0))
    comparison = Comparison(DECODE, ours, peer)
    assert comparison.ratios == [1.5, 1.8, 2.0]
    assert comparison.ratio == 1.8
    shown = cast(dict[str, Any], comparison.to_json())
    assert shown["ratio"] == {"median": 1.8, "min": 1.5, "max": 2.0, "all": [1.5, 1.8, 2.0]}
    assert shown["ours"]["typical"]["rate"] == 160.0


def test_each_known_cell_has_a_target_and_carries_its_noise() -> None:
    assert {cell.name for cell in CELLS} == MIN_RATIO.keys() == MIN_RATIO_BFLOAT16.keys()
    c1, c8, c32, short, long = CELLS
    found = targets(
        [
            Comparison(c1, (rated(15.0),), (rated(10.0),)),
            Comparison(c8, (rated(13.9),), (rated(10.0, 0.3),)),
            Comparison(c32, (rated(12.0),), (rated(10.0),)),
            Comparison(short, (rated(10.0),), (rated(10.0),)),
            Comparison(long, (rated(8.9),), (rated(10.0),)),
            Comparison(DECODE, (rated(1.0),), (rated(1.0),)),
        ]
    )
    assert [(one.target, one.met, one.noise) for one in found] == [
        (1.5, True, 0.0),
        (1.4, False, 0.3),
        (1.2, True, 0.0),
        (1.0, True, 0.0),
        (0.9, False, 0.0),
    ]


def test_prompts_never_come_again() -> None:
    prompts = RandomPrompts(1, 1000)
    taken = prompts.take(3, 40) + prompts.take(3, 40)
    assert len({tuple(prompt) for prompt in taken}) == 6
    assert all(len(prompt) == 40 and min(prompt) >= FIRST_ORDINARY_ID and max(prompt) < 1000 for prompt in taken)
    assert RandomPrompts(1, 1000).take(3, 40) == taken[:3]


# --- the client -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """The URL of a server that says the same to everybody."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def whole(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}\n\n'


async def test_events_are_counted_until_done() -> None:
    stream = b'data: {"choices": [{"text": "a"}]}\n\n' * 2 + b": a comment\n\n" + USAGE + b"data: [DONE]\n\n"
    async with answering(whole("200 OK", stream)) as url:
        timing = await complete(Endpoint(url, "m"), [5, 6], 3)
    assert len(timing.event_s) == 2
    assert timing.begin_s < timing.event_s[0] == timing.begin_s + timing.ttft_s
    assert timing.num_tokens == 3


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (whole("400 Bad Request", b"too long"), "400 b'too long'"),
        (whole("200 OK", USAGE.replace(b"3", b"2")), r"asked for 2 \+ 3 tokens, got \(2, 2\)"),
        (whole("200 OK", b'data: {"error": "lost"}\n\n'), "lost"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", "the connection broke"),
        (b"", "the connection broke"),
    ],
)
async def test_an_answer_that_is_not_what_was_asked_for_is_an_error(answer: bytes, said: str) -> None:
    async with answering(answer) as url:
        with pytest.raises(ServerError, match=said):
            await complete(Endpoint(url, "m"), [5, 6], 3)


async def test_a_server_that_does_not_answer_is_an_error() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ServerError, match="no whole answer"):
            await complete(Endpoint(f"http://127.0.0.1:{silent.getsockname()[1]}", "m"), [5, 6], 3, timeout_s=0.05)


async def test_a_server_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ServerError, match="http://127"):
        await get_json(f"http://127.0.0.1:{free_port()}/v1/models")


# --- servers and turns ------------------------------------------------------------------------------------------------


@pytest.mark.timeout(40)  # less than it takes until a server that does not end is killed
def test_a_server_is_started_frozen_thawed_and_ended(tmp_path: Path) -> None:
    with running(fake_spec(), tmp_path / "log") as server:
        assert server.endpoint.model == "fake"
        taken = run_cell(server.endpoint, DECODE, RandomPrompts(0, 1000))
        assert taken.rate > 0
        assert taken.itl_ms is not None
        assert server.describe()["cores"] == sorted(os.sched_getaffinity(0))
        process = psutil.Process(server._pid)
        server.freeze()
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert process.status() == psutil.STATUS_STOPPED
        server.thaw()
        assert process.status() != psutil.STATUS_STOPPED
        server.freeze()
    assert not process.is_running()


def test_a_server_that_runs_already_is_left_running(tmp_path: Path) -> None:
    with running(fake_spec(), tmp_path / "log") as started:
        pid = started._pid
        with running(ServerSpec("ours", "", started.spec.base_url, pid), tmp_path / "unused") as server:
            assert server.endpoint == started.endpoint
            server.freeze()
            server.thaw()
        assert psutil.Process(pid).is_running()
    assert not (tmp_path / "unused").exists()


def test_a_server_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    spec = ServerSpec("ours", f"{sys.executable} -c 'raise SystemExit(3)'", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(Gone, match="exit code 3"), running(spec, tmp_path / "log"):
        pass


class FakeServer:
    """Writes down what is done to it."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.spec = SimpleNamespace(name=name)
        self.endpoint = name
        self._events = events

    def freeze(self) -> None:
        self._events.append(f"freeze {self.spec.name}")

    def thaw(self) -> None:
        self._events.append(f"thaw {self.spec.name}")

    def cpu_s(self) -> float:
        return 0.0


def test_only_the_measured_server_runs_and_turns_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    rates = iter([30.0, 10.0, 20.0, 40.0])

    def take(endpoint: str, cell: Cell, prompts: RandomPrompts) -> Sample:
        events.append(f"measure {endpoint}")
        return rated(next(rates))

    monkeypatch.setattr(measure_module, "run_cell", take)
    servers = [cast(Any, FakeServer(name, events)) for name in ("ours", "peer")]
    (comparison,) = compare(*servers, [DECODE], Effort(2, 1), RandomPrompts(0, 1000), lambda *_: None)
    ours = ["freeze peer", "measure ours", "thaw peer"]
    peer = ["freeze ours", "measure peer", "thaw ours"]
    assert events == ours + peer + peer + ours
    assert comparison.ratios == [3.0, 2.0]


@pytest.mark.timeout(120)
def test_the_command_compares_two_servers_and_leaves_none(tmp_path: Path) -> None:
    ours, peer = fake_spec("ours"), fake_spec("peer")
    flags = ["--ours", ours.command, "--ours-url", ours.base_url, "--peer", peer.command, "--peer-url", peer.base_url]
    flags += ["--repeats", "2", "--max-tries", "1", "--cells", "decode c1,prefill 512", "--logs", str(tmp_path)]
    flags += ["--json", str(tmp_path / "result.json")]
    path = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "pdserve_bench.peer", *flags]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "result.json").read_text())
    assert [cell["name"] for cell in document["cells"]] == ["decode c1", "prefill 512"]
    assert all(len(cell["ratio"]["all"]) == 2 and cell["ratio"]["min"] > 0 for cell in document["cells"])
    assert [target["target"] for target in document["targets"]] == [1.5, 1.0]
    assert document["conditions"]["settings"]["peer"]["command"] == peer.command
    assert "decode c1" in done.stdout
    for spec in (ours, peer):
        with pytest.raises(ServerError):
            asyncio.run(get_json(spec.base_url + "/v1/models"))
