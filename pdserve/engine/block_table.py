"""A sequence's block ids as an array that compiled code can follow by address. Owns no block."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_FIRST_CAPACITY = 16


class BlockTable:
    """Mirrors a list of ids that only grows, or is replaced by another list."""

    def __init__(self) -> None:
        self._length = 0
        self._source: Sequence[int] = ()
        self._hold(np.zeros(_FIRST_CAPACITY, dtype=np.int32))

    def _hold(self, ids: NDArray[np.int32]) -> None:
        self.ids = ids
        self.address: int = ids.ctypes.data

    def follow(self, block_ids: Sequence[int]) -> None:
        """Make `ids` begin with `block_ids`; it may be longer. `address` is where it lies."""
        length = len(block_ids)
        if block_ids is not self._source or length < self._length:
            self._source, self._length = block_ids, 0
        if length > len(self.ids):
            grown = np.zeros(max(2 * len(self.ids), length), dtype=np.int32)
            grown[: self._length] = self.ids[: self._length]
            self._hold(grown)
        if length > self._length:
            self.ids[self._length : length] = block_ids[self._length :]
            self._length = length
