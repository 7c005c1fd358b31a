import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.chunk_frame import HEADER_BYTES, ChunkHeader, chunk_spans, decode, encode
from pdserve.core.errors import ErrorReason, PdserveError

U32 = st.integers(0, 2**32 - 1)
HEADERS = st.builds(
    ChunkHeader,
    transfer_id=st.integers(0, 2**64 - 1),
    epoch=U32,
    sequence=U32,
    first_block=U32,
    byte_offset=U32,
    num_blocks=U32,
)
HEADER = ChunkHeader(transfer_id=3, epoch=1, sequence=2, first_block=4, byte_offset=5, num_blocks=1)


def assert_refused(frame: bytes) -> None:
    with pytest.raises(PdserveError) as refused:
        decode(frame)
    assert refused.value.reason is ErrorReason.TRANSFER_FAILED


def test_the_header_is_laid_out_as_the_contract_says():
    frame = encode(HEADER, (memoryview(b"abc"),))
    assert HEADER_BYTES == 48
    assert frame[:4] == b"PDKV"
    assert struct.unpack_from("<HHQIIIIII", frame, 4) == (1, 0, 3, 1, 2, 4, 5, 1, 3)
    assert frame[48:] == b"abc"


@given(HEADERS, st.lists(st.binary(max_size=100), max_size=4))
def test_round_trip(header: ChunkHeader, pages: list[bytes]):
    decoded, payload = decode(encode(header, [memoryview(page) for page in pages]))
    assert decoded == header
    assert payload == b"".join(pages)


@given(HEADERS, st.binary(max_size=64), st.data())
def test_any_flipped_bit_is_detected(header: ChunkHeader, payload: bytes, data: st.DataObject):
    frame = bytearray(encode(header, (memoryview(payload),)))
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[bit // 8] ^= 1 << bit % 8
    assert_refused(bytes(frame))


@given(st.binary(max_size=64), st.data())
def test_a_cut_or_longer_frame_is_refused(payload: bytes, data: st.DataObject):
    frame = encode(HEADER, (memoryview(payload),))
    assert_refused(frame[: data.draw(st.integers(0, len(frame) - 1))])
    assert_refused(frame + b"\0")


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes):
    assert_refused(noise)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(torch.bfloat16, torch.int16), (torch.float16, torch.int16), (torch.float32, torch.int32)],
)
def test_every_nan_payload_survives(dtype: torch.dtype, bits: torch.dtype):
    patterns = torch.arange(0, 65536, dtype=torch.int32)
    patterns = (patterns << 16 | 0x7F800001).to(torch.int32) if dtype is torch.float32 else patterns.to(bits)
    values = patterns.view(dtype)
    sent = memoryview(values.view(torch.uint8).numpy())
    assert sent.nbytes == values.numel() * values.element_size()
    _, payload = decode(encode(HEADER, (sent,)))
    received = torch.frombuffer(bytearray(payload), dtype=dtype)
    assert torch.equal(received.view(bits), values.view(bits))
    assert values.isnan().any()


@given(st.integers(0, 20), st.integers(0, 30), st.integers(1, 50), st.integers(1, 120))
def test_spans_cover_every_byte_once_and_in_order(first: int, count: int, block_bytes: int, chunk_bytes: int):
    covered: list[tuple[int, int]] = []
    for span in chunk_spans(first, count, block_bytes, chunk_bytes):
        assert 0 < span.num_bytes <= chunk_bytes
        assert span.num_blocks == 1 or (span.byte_offset == 0 and span.num_bytes == span.num_blocks * block_bytes)
        start = span.first_block * block_bytes + span.byte_offset
        covered += [divmod(byte, block_bytes) for byte in range(start, start + span.num_bytes)]
    assert covered == [(block, byte) for block in range(first, first + count) for byte in range(block_bytes)]
