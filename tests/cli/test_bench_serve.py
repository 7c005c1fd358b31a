"""`pdserve bench serve` and `bench capacity` as a user runs them, against a server with set timing."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdserve.cli.app import app
from tests.support.threaded_server import threaded
from tests.support.timed_server import MODEL, Behaviour, TimedServer

SHORT = ["--input-len", "32", "--output-len", "4"]
WAIT_S = 60.0


class Cache:
    """Behaves as a server with a prefix cache of blocks of 16 tokens."""

    def __init__(self) -> None:
        self._blocks: set[tuple[int, ...]] = set()

    def __call__(self, prompt: list[int]) -> Behaviour:
        ends = range(16, len(prompt) + 1, 16)
        found = [end for end in ends if tuple(prompt[:end]) in self._blocks]
        self._blocks |= {tuple(prompt[:end]) for end in ends}
        return Behaviour(num_cached=min(len(found), (len(prompt) - 1) // 16) * 16)


@pytest.fixture
def cached() -> Iterator[TimedServer]:
    with threaded(Cache()) as server:
        yield server


def run(server: TimedServer | str, *arguments: str, command: str = "serve") -> tuple[int, str, str]:
    url = server if isinstance(server, str) else server.base_url
    result = CliRunner().invoke(
        app, ["bench", command, "--base-url", url, *arguments], env={"COLUMNS": "200"}, catch_exceptions=False
    )
    return result.exit_code, result.stdout, result.stderr


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def j05() -> Callable[[list[int]], Behaviour]:
    numbers = count()
    kinds = {"error": Behaviour(end="error", num_before_end=2), "empty": Behaviour(end="empty")}
    turns = ["good"] * 16 + ["error"] * 2 + ["empty"] + ["never"]
    kinds |= {"never": Behaviour(end="never", num_before_end=1), "good": Behaviour()}
    return lambda _: kinds[turns[next(numbers) % len(turns)]]


@pytest.mark.parametrize(("limit", "code"), [([], 1), (["--max-failures", "14"], 1), (["--max-failures", "15"], 0)])
def test_j05_failures_are_counted_apart_and_give_an_exit_code(limit: list[str], code: int, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    flags = ["--num-prompts", "100", *SHORT, "--num-warmups", "0", "--drain", "2", "--json", str(file)]
    with threaded(j05()) as server:
        found, out, err = run(server, *flags, *limit)
    assert found == code
    told = "15 failed, 0 rejected, 0 wrong of 100 requests: 15, of which --max-failures allows"
    assert f"{'error' if code else 'note'}: {told}" in err
    assert "80/100" in out
    summary = read(file)["summary"]
    assert (summary["completed"], summary["failed"], summary["unfinished"]) == (80, 15, 5)
    assert (summary["offered"], summary["goodput"], summary["num_good"]) == (100, 0.8, 80)
    assert (summary["ttft"]["count"], summary["e2e"]["count"], summary["itl"]["count"]) == (80, 80, 80 * 3)
    received = 80 * 4 + 10 * 2 + 5 * 1
    assert summary["output_throughput"] * summary["duration_s"] == pytest.approx(received)
    assert "10x in mid-stream" in err


def test_j04_two_default_runs_never_measure_the_cache(cached: TimedServer, tmp_path: Path) -> None:
    """Nor do a run's warm-ups fill it for what follows."""
    file = tmp_path / "run.json"
    seeds: list[int] = []
    for _ in range(2):
        code, out, err = run(cached, "--num-prompts", "20", *SHORT, "--num-warmups", "5", "--json", str(file))
        assert code == 0
        assert "prefix cache: hit rate intended 0.0%, measured 0.0%" in out
        document = read(file)
        assert document["prefix_cache_hit_rate"] == {"intended": 0.0, "measured": 0.0}
        seeds.append(document["conditions"]["seeds"]["load"])
        assert f"--seed {seeds[-1]} sends the same again" in err
    assert seeds[0] != seeds[1]
    assert len(cached.bodies) == 50


def test_j04_a_run_that_measures_the_cache_says_so_loudly(cached: TimedServer, tmp_path: Path) -> None:
    flags = ["--num-prompts", "20", *SHORT, "--seed", "7", "--html", str(tmp_path / "page.html")]
    assert run(cached, *flags)[0] == 0
    code, out, err = run(cached, *flags)
    assert code == 3
    assert "error: THE PREFIX CACHE WAS MEASURED: hit rate intended 0.0%, measured 50.0%" in err
    assert "measured 50.0%" in out
    assert "THE PREFIX CACHE WAS MEASURED" in (tmp_path / "page.html").read_text(encoding="utf-8")
    code, _, err = run(cached, *flags, "--allow-cached")
    assert code == 0
    assert "note: THE PREFIX CACHE WAS MEASURED" in err


def test_j04_shared_prefixes_are_intended(cached: TimedServer) -> None:
    """One request at a time, so that the fake cache has every prompt before the next one comes."""
    flags = ["--preset", "rag", "--rate-factor", "60", "--duration", "2", "--max-concurrency", "1"]
    code, out, err = run(cached, *flags)
    found = re.search(r"hit rate intended ([\d.]+)%, measured ([\d.]+)%", out)
    assert found is not None
    intended, measured = map(float, found.groups())
    assert intended > 10
    assert measured == pytest.approx(intended, abs=2)
    assert code == 0, err


def test_a_run_is_repeated_from_the_seed_that_it_recorded(cached: TimedServer, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    flags = ["--request-rate", "200", "--num-prompts", "15", *SHORT, "--num-warmups", "1", "--json", str(file)]
    assert run(cached, *flags)[0] == 0
    first, sent = read(file), sorted(body["prompt"] for body in cached.bodies)
    seed = str(first["conditions"]["seeds"]["load"])
    assert first["conditions"]["settings"]["seed"] == int(seed) == first["run"]["about"]["seed"]
    assert run(cached, *flags, "--seed", seed)[0] == 3
    second = read(file)
    assert sorted(body["prompt"] for body in cached.bodies[16:]) == sent
    times = [[one["scheduled_s"] for one in document["run"]["records"]] for document in (first, second)]
    assert times[0] == times[1]


def test_every_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = ["--json", "r.json", "--csv", "r.csv", "--html", "r.html", "--save-result", "--result-dir", "vllm"]
    vllm = ["--goodput", "ttft:60000", "tpot:60000", "--percentile-metrics", "ttft,itl", "--metric-percentiles", "90"]
    flags = ["--preset", "mixed", "--rate-factor", "10", "--duration", "2", "--max-concurrency", "4", "--seed", "1"]
    with threaded(lambda _: Behaviour()) as server:
        code, out, err = run(server, *flags, *files, *vllm, "--check-outputs", "2")
    assert code == 0, err
    assert "By class" in out
    assert "outputs checked: 2, of which 0 wrong" in out
    document, num = read(Path("r.json")), len(server.bodies) - 2 - 2
    assert document["conditions"]["settings"]["preset"] == "mixed"
    assert document["summary"]["offered"] == num == len(document["run"]["records"])
    assert len(Path("r.csv").read_text(encoding="utf-8").splitlines()) == num + 1
    assert "<html" in Path("r.html").read_text(encoding="utf-8")
    (path,) = Path("vllm").iterdir()
    assert re.fullmatch(rf"openai-9\.2qps-concurrency4-{MODEL}-\d{{8}}-\d{{6}}\.json", path.name)
    assert f"written: vllm/{path.name}" in err
    result = read(path)
    assert (result["completed"], result["failed"], result["model_id"]) == (num, 0, MODEL)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert {"mean_ttft_ms", "p90_itl_ms"} <= result.keys()
    assert "p90_tpot_ms" not in result


def test_the_key_is_sent_and_not_written(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    with threaded(lambda _: Behaviour()) as server:
        assert run(server, "--num-prompts", "2", *SHORT, "--api-key", "secret", "--json", str(file))[0] == 0
    assert set(server.authorizations) == {"Bearer secret"}
    assert "secret" not in file.read_text(encoding="utf-8")


def test_a_search_says_what_it_found(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    flags = ["--search", "--request-rate", "10", "--duration", "0.5", "--repeats", "1", *SHORT, "--slo-ttft-ms", "0"]
    with threaded(lambda _: Behaviour()) as server:
        code, out, err = run(server, *flags, "--json", str(file), "--html", str(tmp_path / "found.html"))
    assert code == 1
    assert "No rate was found at which goodput is good enough: 10 requests/s are too many." in out
    assert "10 requests/s, run 1: goodput 0.0%, did not pass" in err
    document = read(file)
    assert (document["found"]["rate"], document["found"]["failing_rate"]) == (None, 10.0)
    assert len(document["runs"]) == len(document["found"]["trials"]) == 1


def test_a_sweep_goes_on_with_the_cells_that_it_has(tmp_path: Path) -> None:
    cells, file = tmp_path / "cells.json", tmp_path / "capacity.json"
    flags = ["--rates", "20,40", "--documents", "0,1", "--duration", "0.4", "--document-len", "64", *SHORT]
    files = ["--cells", str(cells), "--json", str(file), "--html", str(tmp_path / "capacity.html")]
    lenient = ["--slo-ttft-ms", "60000", "--slo-itl-ms", "60000", "--document-output-len", "8"]
    with threaded(lambda prompt: Behaviour(first_token_s=0.1 if len(prompt) == 64 else 0.0)) as server:
        code, out, err = run(server, *flags, *files, *lenient, command="capacity")
        num_sent = len(server.bodies)
        again = run(server, *flags, *files, *lenient, command="capacity")
        other = run(server, *flags, *files, *lenient, "--document-output-len", "9", command="capacity")
    assert code == 0, err
    assert "The safe point is 40 requests/s, 1 documents" in out
    document = read(file)
    assert [(cell["num_documents"], cell["rate"]) for cell in document["cells"]] == [
        (0, 20.0),
        (0, 40.0),
        (0, 44.0),
        (1, 20.0),
        (1, 40.0),
        (2, 44.0),
    ]
    assert document["safe_point"] == {"num_documents": 1, "rate": 40.0}
    assert again[:2] == (0, out)
    assert len(server.bodies) == num_sent
    assert other[0] == 1
    assert "holds cells of another sweep: document_output_tokens differ" in other[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--request-rate", "0"], "--request-rate 0: expected requests/s above 0, or inf"),
        (["--goodput", "ttfb:5"], "--goodput: goodput objective 'ttfb:5'"),
        (["--goodput", "ttft:5", "tpot:x"], "--goodput: goodput objective 'tpot:x'"),
        (["ttft:5"], "unexpected argument ttft:5"),
        (["--percentile-metrics", "ttfb"], "--percentile-metrics: percentile metric 'ttfb'"),
        (["--metric-percentiles", "101"], "--metric-percentiles: percentile '101'"),
        (["--preset", "chat", "--num-prompts", "5"], "--num-prompts has no effect on the preset chat"),
        (["--trace", "nowhere.csv"], "nowhere.csv: no such trace file"),
        (["--base-url", "localhost"], "--base-url localhost: expected http://HOST:PORT"),
        (["--search", "--repeats", "2"], "2 repeats can be a tie"),
        (["--search", "--min-goodput", "1.5"], "threshold 1.5 is not in (0, 1]"),
        (["--search", "--num-prompts", "5"], "--num-prompts has no effect on --search"),
        (["--search", "--save-result"], "--save-result has no effect on --search"),
        (["--vocab-size", "3"], "random prompts need a vocabulary of 32 or more, not 3"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(flags: list[str], message: str) -> None:
    code, out, err = run("http://127.0.0.1:9", *flags)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rates", "1,x"], "--rates 1,x: expected numbers"),
        (["--rates", "0"], "rates (0.0,): expected some, each above 0"),
        (["--documents", "-1"], "documents (-1,): expected some"),
        (["--duration", "0"], "--duration 0: expected seconds above 0"),
        (["--input-len", "x"], "--input-len x: expected"),
    ],
)
def test_wrong_flags_of_a_sweep_are_one_line_and_exit_code_2(flags: list[str], message: str) -> None:
    code, out, err = run("http://127.0.0.1:9", *flags, command="capacity")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")


def test_a_server_that_is_not_there_is_one_line() -> None:
    code, out, err = run("http://127.0.0.1:9", "--num-prompts", "1")
    assert (code, out) == (1, "")
    assert "error: http://127.0.0.1:9/v1/models: " in err
    assert "Traceback" not in err


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    """One request at a time: once the third has come, two are complete."""
    file, numbers, third = tmp_path / "run.json", count(), threading.Event()

    def behave(_prompt: list[int]) -> Behaviour:
        if next(numbers) < 2:
            return Behaviour()
        third.set()
        return Behaviour(end="never", num_before_end=1)

    flags = ["--num-prompts", "5", *SHORT, "--num-warmups", "0", "--max-concurrency", "1", "--check-outputs", "1"]
    with threaded(behave) as server:
        command = [sys.executable, "-m", "pdserve.cli", "bench", "serve", "--base-url", server.base_url]
        process = subprocess.Popen(
            [*command, *flags, "--json", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        try:
            assert third.wait(WAIT_S)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "error: interrupted: the figures are of what was measured until then" in err
    assert "2/5" in out
    document = read(file)
    assert document["run"]["interrupted"]
    assert (document["summary"]["completed"], document["summary"]["unfinished"]) == (2, 3)


def test_help_loads_no_client_of_the_bench() -> None:
    code = "import sys, pdserve.cli.app; print(sorted({'aiohttp', 'grpc', 'matplotlib', 'torch'} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout == "[]\n"
