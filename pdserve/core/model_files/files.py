"""What every model source offers, and the fingerprint that tells two models apart. Decodes no tensor."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from pdserve.core.model_files.config import ModelConfig

_HASH_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies. `name` is Hugging Face's, `dtype` the file's ("F32", "BF16", "Q4_1", …).

    `shape` is row-major. `rope_heads` > 0: the rows of each of that many heads come as interleaved rotary pairs and
    belong in two halves. `plus` is to be added to every value, in fp32: some files store norm weights minus one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int
    rope_heads: int = 0
    plus: float = 0.0

    def map_bytes(self) -> np.ndarray:
        """The tensor's bytes as a private memory map: uint8 [num_bytes]; writing to it changes no file."""
        return np.memmap(self.path, dtype=np.uint8, mode="c", offset=self.offset, shape=(self.num_bytes,))


class ModelFiles(Protocol):
    """One model on disk."""

    @property
    def source(self) -> Path:
        """The directory or the .gguf file."""
        ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def gguf_metadata(self) -> Mapping[str, object] | None:
        """Raw key-values of a GGUF file (ints, floats, bools, strings, lists); None for a directory."""
        ...

    def stored_tensors(self) -> list[StoredTensor]:
        """Every tensor of the checkpoint, in file order.

        Raises:
            PdserveError: a file is missing, truncated, or contradicts its index; the message names it.
        """
        ...


def fingerprint(files: ModelFiles, load_dtype: str) -> str:
    """xxh3_128 (hex) over config, tensors in file order, and load dtype; reads every byte of every tensor."""
    digest = xxhash.xxh3_128()
    digest.update(json.dumps(asdict(files.config), sort_keys=True).encode())
    digest.update(load_dtype.encode())
    for tensor in files.stored_tensors():
        digest.update(f"{tensor.name}\0{tensor.dtype}\0{tensor.shape}".encode())
        data = tensor.map_bytes()
        for start in range(0, tensor.num_bytes, _HASH_CHUNK_BYTES):
            digest.update(data[start : start + _HASH_CHUNK_BYTES].data)
    return digest.hexdigest()
