"""The tensor that holds all KV blocks, and raw access to a block's bytes. Who owns which block is decided elsewhere."""

import math

import numpy as np
import torch
from torch import Tensor

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_info import KvLayout
from pdserve_kernels.host_memory import huge_empty, shared_empty

INNER_ORDERS = ("slot_dim", "word_columns")
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PagedKv:
    """A block store (see `interfaces.BlockStore`) over one pool tensor.

    `pool` is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]: a block is one contiguous run of bytes.
    The last two dimensions are to be taken literally in the inner order "slot_dim" only. `shared_fd`: of the file that
    holds the pool's bytes from its beginning to its end, if it was made `shared`, on the CPU, else None.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device, *, shared: bool = False) -> None:
        if num_blocks < 1:
            raise PdserveError(ErrorReason.INVALID_ARGUMENT, f"a pool of {num_blocks} KV blocks cannot serve")
        if layout.inner_order not in INNER_ORDERS or layout.scale_layout != "none" or layout.dtype not in TORCH_DTYPES:
            raise PdserveError(ErrorReason.UNSUPPORTED, f"KV layout {layout} is not implemented")
        self._layout = layout
        heads = layout.num_kv_heads // layout.head_shard_size
        shape = (num_blocks, layout.num_layers, 2, heads, layout.block_size, layout.head_dim)
        self.shared_fd: int | None = None
        dtype = TORCH_DTYPES[layout.dtype]
        if shared:
            area, self.shared_fd = shared_empty(num_blocks * layout.block_bytes)
            pool = area.view(dtype).view(shape)
        else:
            pool = _allocate(shape, dtype, device)
        # Touched at once, so that memory which is not there fails now and not in the middle of a generation.
        self.pool: Tensor = pool.zero_()
        self._bytes = self.pool.view(num_blocks, -1).view(torch.uint8)
        self._host: np.ndarray | None = self._bytes.numpy() if device.type == "cpu" else None

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def num_blocks(self) -> int:
        return self.pool.shape[0]

    def read_block(self, block_id: int) -> memoryview:
        """The block's bytes: on CPU the pool's own memory, else a copy."""
        self._check(block_id, 0, 0)
        if self._host is None:
            return memoryview(self._bytes[block_id].cpu().numpy().data)
        return memoryview(self._host[block_id].data)

    def write_block(self, block_id: int, offset: int, data: bytes | memoryview) -> None:
        """Put `data` at byte `offset` of the block.

        Raises:
            PdserveError: INVALID_ARGUMENT, no such block or bytes past its end; nothing is written.
        """
        source = np.frombuffer(data, dtype=np.uint8)
        self._check(block_id, offset, len(source))
        end = offset + len(source)
        if self._host is not None:
            self._host[block_id, offset:end] = source
        else:
            staged = torch.from_numpy(source.copy())
            self._bytes[block_id, offset:end].copy_(staged)
            torch.cuda.synchronize(self._bytes.device)

    def _check(self, block_id: int, offset: int, num_bytes: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise PdserveError(ErrorReason.INVALID_ARGUMENT, f"block {block_id} is none of the {self.num_blocks}")
        if offset < 0 or offset + num_bytes > self._layout.block_bytes:
            raise PdserveError(
                ErrorReason.INVALID_ARGUMENT,
                f"bytes {offset} to {offset + num_bytes} do not lie in a block of {self._layout.block_bytes}",
            )


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return huge_empty(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
