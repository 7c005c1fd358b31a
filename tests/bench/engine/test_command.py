"""`pdserve bench engine` as a user runs it, on a tiny model."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

FLAGS = ["--batch", "1,3", "--context", "40", "--prefill-tokens", "50", "--chunk", "16,64", "--threads", "1"]
FEW = ["--steps", "4", "--prefills", "1", "--repeats", "1"]
WAIT_S = 60.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pdserve.cli", "bench", "engine", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "COLUMNS": "200"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, env=environment())


def test_it_measures_every_cell_and_writes_json(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    done = run("--model", str(tiny_model), *FLAGS, *FEW, "--dtype", "float32", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "Decode: float32, 1 thread, float32 attention" in done.stdout
    assert "Targets" not in done.stdout
    document = json.loads(file.read_text(encoding="utf-8"))
    assert (document["benchmark"], document["targets"]) == ("engine", [])
    (result,) = document["configurations"]
    assert document["conditions"]["settings"]["fingerprints"] == {"float32": result["fingerprint"]}
    assert result["configuration"] == {"dtype": "float32", "num_threads": 1, "attention": "float32"}
    assert [(cell["batch"], cell["context"], cell["step"]["num"]) for cell in result["decode"]] == [
        (1, 40, 4),
        (3, 40, 4),
    ]
    assert [(cell["num_tokens"], cell["chunk"]) for cell in result["prefill"]] == [(50, 16), (50, 64)]
    for cell in result["decode"]:
        assert cell["floors"] == pytest.approx(cell["step"]["median_s"] / cell["floor_s"])
        assert cell["floor_s"] == pytest.approx(cell["bytes_read"] / result["limits"]["bytes_per_s"])
    for cell in result["decode"] + result["prefill"]:
        assert sum(cell["shares"].values()) == pytest.approx(1)
        assert all(cell["shares"][part] > 0 for part in ("gemm", "attention", "sampling", "model_rest"))


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--batch", "8,x"], 2, "--batch 8,x: expected whole numbers above 0"),
        (["--batch", "0"], 2, "--batch 0: expected whole numbers above 0"),
        (["--dtype", "float16"], 2, "--dtype float16: expected bfloat16 or float32"),
        (["--threads", "999"], 1, "999 threads were asked for"),
        (["--context", "4096"], 1, "do not fit the model's context of 4096"),
    ],
)
def test_what_cannot_be_measured_is_one_line(tiny_model: Path, flags: list[str], code: int, message: str) -> None:
    done = run("--model", str(tiny_model), *flags)
    assert done.returncode == code
    assert done.stderr.startswith(f"error: {message}" if code == 2 else "error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_the_command(tiny_model: Path, number: signal.Signals) -> None:
    endless = ["--batch", "1", "--context", "40", "--prefill-tokens", "50", "--prefills", "1000000", "--threads", "1"]
    process = subprocess.Popen(
        command("--model", str(tiny_model), *endless), stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stderr is not None
    with process, process.stderr:
        try:
            assert "limits:" in process.stderr.readline()
            (child,) = psutil.Process(process.pid).children()
            ended = os.pidfd_open(child.pid)
            process.send_signal(number)
            assert select.select([ended], [], [], WAIT_S)[0], "the child goes on"
            os.close(ended)
            assert process.wait(WAIT_S) == (130 if number is signal.SIGINT else -number)
        finally:
            process.kill()
