"""How kernels are compiled, and where machine code is kept: a folder named after the sources it was made from.

numba looks at the file of a kernel only, not at what it includes; a folder of its own for each state of this package
makes sure that no stale code is ever run. Where that folder cannot be written, nothing is kept beyond the process, and
what cannot be read back is compiled again. Import this module before numba compiles anything.
"""

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numba.core.config as numba_config
import xxhash
from numba.core.caching import IndexDataCacheFile

_LOG = logging.getLogger(__name__)


def _sources_hash() -> str:
    digest = xxhash.xxh3_64(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where compiled kernels are kept: below PDSERVE_CACHE_DIR, or the user's cache."""
    root = os.environ.get("PDSERVE_CACHE_DIR") or "~/.cache/pdserve"
    return Path(root).expanduser() / "kernels" / _sources_hash()


def _keep_in(folder: Path) -> "tempfile.TemporaryDirectory[str] | None":
    """Make numba keep code there, or in a folder that ends with the process, or nowhere at all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    passing = None
    if not writable:
        _LOG.warning("%s cannot be written: kernels are compiled anew in every process", folder)
        try:
            passing = tempfile.TemporaryDirectory(prefix="pdserve-kernels-")
        except OSError:
            return None
    setattr(numba_config, "CACHE_DIR", str(folder) if passing is None else passing.name)  # noqa: B010 - made at run time
    return passing


_passing_folder = _keep_in(cache_folder())
_keeps = bool(getattr(numba_config, "CACHE_DIR", ""))
_load: Callable[[Any, Any], Any] = IndexDataCacheFile.load  # pyright: ignore[reportUnknownVariableType]


def _load_or_compile(self: Any, key: Any) -> Any:
    """numba expects no damaged files: a full disk, or power lost in the middle of writing."""
    try:
        return _load(self, key)
    except Exception as error:  # noqa: BLE001 - whatever unpickling half a file may raise
        _LOG.warning("a compiled kernel could not be read back (%s): it is compiled again", type(error).__name__)
        return None


setattr(IndexDataCacheFile, "load", _load_or_compile)  # noqa: B010 - there is no seam for it

JIT: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False, "cache": _keeps}
"""Options of every kernel; never fastmath."""

CFUNC: dict[str, Any] = {"error_model": "numpy", "cache": _keeps}
"""Options of what is called by address: big kernels, so that no caller's machine code holds another copy."""

_TYPES = {"i": numba.types.int64, "f": numba.types.float32, "d": numba.types.float64}


def signature(parameters: str, result: str = "") -> Any:
    """ "iif" → (int64, int64, float32): given, so that literals and booleans do not make further versions."""
    returned = _TYPES[result] if result else numba.types.void
    return returned(*(_TYPES[letter] for letter in parameters))
