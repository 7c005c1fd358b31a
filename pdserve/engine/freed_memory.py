"""Gives freed memory back to the system, which the C library's allocator keeps for itself. Frees nothing."""

import ctypes


def return_freed_memory() -> None:
    """Of what this process has freed, all whole pages; where the C library cannot (it is not glibc), nothing happens.

    Loading frees about as much as the weights take, in pieces too small for the allocator to return by itself.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
