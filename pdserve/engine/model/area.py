"""One run of host memory, given out piece by piece: separate ones would each be rounded up to whole huge pages."""

from torch import Tensor

from pdserve_kernels.host_memory import huge_empty

_ALIGNMENT = 64


class Area:
    """Zeroed, and touched only by whoever writes; it lives as long as this or any of its pieces."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = huge_empty(num_bytes)
        self._used_bytes = 0

    @property
    def num_free_bytes(self) -> int:
        return len(self._memory) - self._used_bytes

    def take(self, num_bytes: int) -> Tensor:
        """The next piece: uint8 [num_bytes], aligned to a cache line. It takes `aligned(num_bytes)`."""
        if aligned(num_bytes) > self.num_free_bytes:
            raise RuntimeError(f"{num_bytes} bytes are wanted of an area with {self.num_free_bytes} left")
        begin = self._used_bytes
        self._used_bytes += aligned(num_bytes)
        return self._memory[begin : begin + num_bytes]


def aligned(num_bytes: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
