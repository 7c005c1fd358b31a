"""The header of a GGUF file (versions 2 and 3, little-endian): key-values and tensor directory, every read bounded.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package's own reader takes seconds for a
vocabulary of 50,000, which each process of a fleet would pay; its tables of types and sizes are used here.
"""

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from pdserve.core.model_files.config import bad_model
from pdserve.core.model_files.damage import damaged

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` is row-major; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: dict[str, object]
    tensors: list[GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse metadata and tensor directory.

    Raises:
        PdserveError: the file cannot be read, is no GGUF, is truncated, or holds a type nobody knows.
    """
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r").data if path.stat().st_size else memoryview(b"")
    except OSError as error:
        raise bad_model(f"cannot read {path}: {error.strerror}") from error
    try:
        return _parse(_Cursor(data))
    except (ValueError, KeyError, OverflowError, struct.error) as error:
        raise damaged(path, f"is truncated or malformed: {error}") from error


class _Cursor:
    """Reads forward through the file; every read past the end raises."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def take(self, num_bytes: int) -> memoryview:
        if num_bytes > len(self.data) - self.at:
            raise ValueError(f"it ends at byte {len(self.data)}, before what it announces")
        self.at += num_bytes
        return self.data[self.at - num_bytes : self.at]

    def scalar(self, code: str) -> int:
        value: int
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize(code)))
        return value

    def string(self) -> str:
        return bytes(self.take(self.scalar("Q"))).decode("utf-8", errors="replace")

    def value(self, kind: GGUFValueType) -> object:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.scalar(_SCALARS[kind])
        item_kind, length = GGUFValueType(self.scalar("I")), self.scalar("Q")
        if item_kind in _SCALARS:
            code = _SCALARS[item_kind]
            return list(struct.unpack(f"<{length}{code}", self.take(length * struct.calcsize(code))))
        if item_kind != GGUFValueType.STRING:
            raise ValueError("it nests arrays")
        return [self.string() for _ in range(length)]


def _parse(cursor: _Cursor) -> GgufHeader:
    if bytes(cursor.take(4)) != b"GGUF":
        raise ValueError("it does not start with GGUF")
    version = cursor.scalar("I")
    if version not in {2, 3}:
        raise ValueError(f"GGUF version {version} is not known (2 and 3 are)")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, object] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(GGUFValueType(cursor.scalar("I")))
    directory = [_directory_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    data_start = -(-cursor.at // alignment) * alignment
    return GgufHeader(metadata, [_located(*entry, data_start, len(cursor.data)) for entry in directory])


def _directory_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.string()
    num_dims = cursor.scalar("I")
    shape = tuple(reversed([cursor.scalar("Q") for _ in range(num_dims)]))
    return name, shape, GGMLQuantizationType(cursor.scalar("I")), cursor.scalar("Q")


def _located(
    name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int, data_start: int, file_bytes: int
) -> GgufTensor:
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block_elements:
        raise ValueError(f"{name} has shape {shape}, which {kind.name} cannot hold")
    num_bytes = prod(shape) // block_elements * block_bytes
    if data_start + offset + num_bytes > file_bytes:
        raise ValueError(f"{name} ends after the file does ({file_bytes} bytes)")
    return GgufTensor(name, kind.name, shape, data_start + offset, num_bytes)
