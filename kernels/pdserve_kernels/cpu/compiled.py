"""How kernels are compiled, and where machine code is kept: a folder named after the sources it was made from.

numba looks at the file of a kernel only, not at what it includes; a folder of its own for each state of this package
makes sure that no stale code is ever run. Import this module before numba compiles anything.
"""

import os
from pathlib import Path
from typing import Any

import numba
import numba.core.config as numba_config
import xxhash

JIT: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False, "cache": True}
"""Options of every kernel; never fastmath."""

CFUNC: dict[str, Any] = {"error_model": "numpy", "cache": True}
"""Options of what is called by address: big kernels, so that no caller's machine code holds another copy."""


def _sources_hash() -> str:
    digest = xxhash.xxh3_64(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where compiled kernels are kept: below PDSERVE_CACHE_DIR, or the user's cache."""
    root = os.environ.get("PDSERVE_CACHE_DIR") or "~/.cache/pdserve"
    return Path(root).expanduser() / "kernels" / _sources_hash()


setattr(numba_config, "CACHE_DIR", str(cache_folder()))  # noqa: B010 - numba makes it at run time

_TYPES = {"i": numba.types.int64, "f": numba.types.float32, "d": numba.types.float64}


def signature(parameters: str, result: str = "") -> Any:
    """ "iif" → (int64, int64, float32): given, so that literals and booleans do not make further versions."""
    returned = _TYPES[result] if result else numba.types.void
    return returned(*(_TYPES[letter] for letter in parameters))
