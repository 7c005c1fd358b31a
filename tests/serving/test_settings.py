"""What clients call a model."""

from pathlib import Path

import pytest

from pdserve.serving.settings import ModelSettings


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("/models/tiny", "tiny"),
        ("/models/tiny/", "tiny"),
        ("/models/tiny.gguf", "tiny.gguf"),
        ("models/tiny.gguf", "tiny.gguf"),
        ("models/tiny.GGUF", "tiny.GGUF"),
        ("./models/tiny", "tiny"),
        ("../tiny", "tiny"),
        ("~/tiny", "tiny"),
        ("org/name-1.5B", "org/name-1.5B"),
        ("org/name@refs/pr/1", "org/name"),
        ("org/name/file.gguf", "file.gguf"),
    ],
)
def test_names_follow_from_sources(source: str, name: str) -> None:
    assert ModelSettings(source=source).name == name
    assert ModelSettings(source=source, served_name="other").name == "other"


def test_the_current_directory_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path / "tiny")
    assert ModelSettings(source=".").name == "tiny"
