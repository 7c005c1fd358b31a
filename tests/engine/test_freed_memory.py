"""What is freed goes back to the system, where the C library can be told so."""

import platform
from types import SimpleNamespace

import pytest
import torch

from pdserve.engine import freed_memory
from pdserve.engine.freed_memory import return_freed_memory
from pdserve.engine.memory_probe import resident_bytes

CPU = torch.device("cpu")
PIECE_BYTES, NUM_PIECES = 64 << 10, 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_memory_freed_in_small_pieces_goes_back_to_the_system() -> None:
    pieces = [b"\1" * PIECE_BYTES for _ in range(NUM_PIECES)]
    last = pieces[-1]  # at the top of the heap, which alone would shrink by itself
    held = resident_bytes(CPU)
    del pieces
    return_freed_memory()
    assert held - resident_bytes(CPU) > NUM_PIECES * PIECE_BYTES * 0.75
    assert len(last) == PIECE_BYTES


def test_another_c_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda name: SimpleNamespace())
    return_freed_memory()
