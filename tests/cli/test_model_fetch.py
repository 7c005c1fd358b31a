"""`pdserve model fetch`: prints a path and nothing else, or one line of why not."""

import sys
from pathlib import Path

import pytest

from pdserve.cli.app import run
from tests.support.hub_server import Hub, serving


def fetch(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code."""
    monkeypatch.setenv("PDSERVE_CACHE_DIR", str(cache))
    monkeypatch.setattr(sys, "argv", ["pdserve", "model", "fetch", name])
    with pytest.raises(SystemExit) as ended:
        run()
    return int(ended.value.code or 0)


def test_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(Hub("acme/tiny", {"tiny.gguf": b"GGUF"})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        assert fetch("acme/tiny/tiny.gguf", tmp_path, monkeypatch) == 0
    assert Path(capfd.readouterr().out.rstrip("\n")).read_bytes() == b"GGUF"


def test_an_unknown_name_is_refused_with_the_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fetch("gpt-9", tmp_path, monkeypatch) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "'gpt-9'" in err
    assert "smollm2-135m-instruct, gemma3-270m" in err
    assert "ORG/NAME" in err
