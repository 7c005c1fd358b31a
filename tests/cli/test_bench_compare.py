"""`pdserve bench compare` as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.cli.app import app
from tests.support.tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), context_length=4096)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rates", "fast"], "--rates fast"),
        (["--preset", "nothing"], "no preset 'nothing'"),
        (["--trace", "/no/such/trace.csv"], "/no/such/trace.csv"),
        (["--cores", "0", "--prefill", "2"], "need a core each; there are 1"),
        (["--chunks", "64,big"], "--chunks 64,big"),
        (["--chunks", "0"], "all above 0"),
        (["--cores", "0,9999"], "--cores 0,9999: this machine has"),
        (["--rates", "0.000001"], "sends nothing"),
    ],
)
def test_wrong_usage_is_told_by_name(model: Path, tmp_path: Path, flags: list[str], words: str) -> None:
    command = ["bench", "compare", "--model", str(model), "--folder", str(tmp_path), *flags]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_load_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    short = write_tiny_llama(tmp_path / "short", context_length=256)
    command = ["bench", "compare", "--model", str(short), "--folder", str(tmp_path / "study")]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 2
    assert "more than the context of 256" in result.stderr


@pytest.mark.slow
def test_a_whole_study_of_a_tiny_model_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:
    """Real fleets, real processes: the second time nothing is measured again."""
    flags = ["--preset", "chat", "--rates", "2", "--duration", "3", "--pilot-duration", "2", "--repeats", "1"]
    command = [sys.executable, "-m", "pdserve.cli", "bench", "compare", "--model", str(model)]
    command += ["--folder", str(tmp_path), "--chunks", "64", "--prefill-chunks", "512", *flags]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
        assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "report" / "result.json").read_text())
    assert {run["summary"]["completed"] / run["summary"]["offered"] for run in found["runs"]} == {1.0}
    assert {run["summary"]["num_wrong"] for run in found["runs"]} == {0}
    assert found["answers"][0]["decision"]
    assert str(Path.home()) not in json.dumps(found["conditions"])
    times = {path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert max(times) < (tmp_path / "report" / "runs.csv").stat().st_mtime_ns - 5e9
