"""What every way of fetching shares: a lock between processes, notes written whole, and the error for no model."""

import fcntl
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from pdserve.core.errors import ErrorReason, PdserveError


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold an exclusive lock that ends with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_note(path: Path, note: Mapping[str, object]) -> None:
    """Whoever reads the note finds the old one or the new one."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(note), encoding="utf-8")
    os.replace(scratch, path)


def read_note(path: Path) -> dict[str, object]:
    """Empty if there is none that can be read."""
    try:
        note: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast("dict[str, object]", note) if isinstance(note, dict) else {}


def not_found(message: str) -> PdserveError:
    return PdserveError(ErrorReason.MODEL_NOT_FOUND, message, param="model")
