"""Every quantisation of GGUF, block by block, against its definition written out one number at a time (ggml-quants)."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_files import StoredTensor
from pdserve.engine.weights import decode_tensor

NUM_ROWS, BLOCKS_PER_ROW = 3, 2


def nibbles(packed: bytes) -> list[int]:
    """The low halves, then the high ones."""
    return [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]


def fifth_bits(packed: bytes) -> list[int]:
    bits = int.from_bytes(packed, "little")
    return [(bits >> i & 1) << 4 for i in range(32)]


def q4_0(block: bytes) -> list[float]:
    (scale,) = struct.unpack("<e", block[:2])
    return [(q - 8) * scale for q in nibbles(block[2:])]


def q4_1(block: bytes) -> list[float]:
    scale, least = struct.unpack("<ee", block[:4])
    return [q * scale + least for q in nibbles(block[4:])]


def q5_0(block: bytes) -> list[float]:
    (scale,) = struct.unpack("<e", block[:2])
    return [(low + high - 16) * scale for low, high in zip(nibbles(block[6:]), fifth_bits(block[2:6]), strict=True)]


def q5_1(block: bytes) -> list[float]:
    scale, least = struct.unpack("<ee", block[:4])
    return [(low + high) * scale + least for low, high in zip(nibbles(block[8:]), fifth_bits(block[4:8]), strict=True)]


def q8_0(block: bytes) -> list[float]:
    scale, *values = struct.unpack("<e32b", block)
    return [q * scale for q in values]


def scales_and_mins(packed: bytes) -> list[tuple[int, int]]:
    """Eight pairs of six bits in twelve bytes."""
    first = [(packed[j] & 63, packed[j + 4] & 63) for j in range(4)]
    last = [
        (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4) for j in range(4, 8)
    ]
    return first + last


def q4_k(block: bytes) -> list[float]:
    scale, least = struct.unpack("<ee", block[:4])
    values: list[float] = []
    for j, (sub_scale, sub_least) in enumerate(scales_and_mins(block[4:16])):
        packed = block[16 + 32 * (j // 2) :][:32]
        values += [scale * sub_scale * (byte >> 4 * (j % 2) & 15) - least * sub_least for byte in packed]
    return values


def q5_k(block: bytes) -> list[float]:
    scale, least = struct.unpack("<ee", block[:4])
    high, values = block[16:48], list[float]()
    for j, (sub_scale, sub_least) in enumerate(scales_and_mins(block[4:16])):
        packed = block[48 + 32 * (j // 2) :][:32]
        for low, bits in zip(packed, high, strict=True):
            q = (low >> 4 * (j % 2) & 15) + (bits >> j & 1) * 16
            values.append(scale * sub_scale * q - least * sub_least)
    return values


def q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
    (scale,) = struct.unpack("<e", block[208:])
    values: list[float] = []
    for half in range(2):
        for quarter in range(4):
            for i in range(32):
                byte = low[64 * half + 32 * (quarter % 2) + i]
                q = (byte >> 4 * (quarter // 2) & 15) | (high[32 * half + i] >> 2 * quarter & 3) << 4
                values.append(scale * scales[8 * half + 2 * quarter + i // 16] * (q - 32))
    return values


# By name: bytes of a block, where its fp16 numbers lie, and the definition.
FORMATS = {
    "Q4_0": (18, (0,), q4_0),
    "Q4_1": (20, (0, 2), q4_1),
    "Q5_0": (22, (0,), q5_0),
    "Q5_1": (24, (0, 2), q5_1),
    "Q8_0": (34, (0,), q8_0),
    "Q4_K": (144, (0, 2), q4_k),
    "Q5_K": (176, (0, 2), q5_k),
    "Q6_K": (210, (208,), q6_k),
}


def random_block(rng: np.random.Generator, num_bytes: int, halves: tuple[int, ...]) -> bytes:
    block = bytearray(rng.bytes(num_bytes))
    for at in halves:
        block[at : at + 2] = struct.pack("<e", rng.uniform(-2, 2))
    return bytes(block)


@pytest.mark.parametrize("name", FORMATS)
def test_each_number_is_what_the_format_says(tmp_path: Path, name: str) -> None:
    num_bytes, halves, define = FORMATS[name]
    rng = np.random.default_rng(7)
    blocks = [random_block(rng, num_bytes, halves) for _ in range(NUM_ROWS * BLOCKS_PER_ROW)]
    expected = torch.tensor([define(block) for block in blocks], dtype=torch.float64).view(NUM_ROWS, -1)
    path = tmp_path / "weights"
    path.write_bytes(b"head" + b"".join(blocks))
    stored = StoredTensor("w", name, tuple(expected.shape), path, 4, len(blocks) * num_bytes)
    torch.testing.assert_close(decode_tensor(stored).double(), expected, rtol=1e-6, atol=1e-6)


def test_bytes_that_do_not_make_up_the_shape_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(144))
    with pytest.raises(PdserveError) as caught:
        decode_tensor(StoredTensor("w", "Q4_K", (2, 256), path, 0, 144))
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
