"""Row by row: embedding, norm, rotation and the write into pages, against plain definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve_kernels.cpu.gemm import pack
from pdserve_kernels.cpu.rows import add_row, embed_row, norm_row, rotate_head, write_key, write_value

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SENTINEL = -77.0
bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def guarded(size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """`size` values within an area of sentinels, and the area."""
    area = torch.full((size + 64,), SENTINEL, dtype=dtype)
    return area[32:-32], area


def assert_guards(area: Tensor) -> None:
    assert (area[:32] == SENTINEL).all()
    assert (area[-32:] == SENTINEL).all()


@given(dtype=DTYPES, tokens=st.integers(1, 70), half=st.integers(1, 40), scale=st.sampled_from([1.0, 8.0, 25.3]))
@settings(deadline=None, max_examples=30)
def test_an_embedding_row_is_the_tables(dtype, tokens, half, scale):
    size = 2 * half
    table = torch.randn(tokens, size).to(dtype)
    packed = pack(table)
    for token_id in {0, tokens // 2, tokens - 1}:
        out, area = guarded(size)
        embed_row(dtype == torch.bfloat16, packed.address, token_id, size, scale, out.data_ptr())
        assert torch.equal(out, table[token_id].float() * torch.tensor(scale, dtype=torch.float32))
        assert_guards(area)


@given(
    dtype=DTYPES, size=st.integers(1, 200), scale=st.sampled_from([1e-6, 1.0, 1e6]), eps=st.sampled_from([1e-5, 1e-6])
)
@settings(deadline=None, max_examples=60)
def test_a_norm_equals_its_definition(dtype, size, scale, eps):
    x, weight = torch.randn(size) * scale, 1 + 0.1 * torch.randn(size)
    expected = x.double() * (x.double().square().mean() + eps).rsqrt() * weight.double()
    out, area = guarded(size, dtype)
    norm_row(x.data_ptr(), weight.data_ptr(), size, eps, dtype == torch.bfloat16, out.data_ptr())
    relative = 2.0**-8 if dtype == torch.bfloat16 else 3e-6
    assert ((out.double() - expected).abs() <= expected.abs() * relative + 1e-37).all()
    assert_guards(area)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 100, 576])
def test_a_norm_in_place_has_the_bits_of_one_that_is_not(size):
    x, weight, out = torch.randn(size), torch.randn(size), torch.zeros(size)
    norm_row(x.data_ptr(), weight.data_ptr(), size, 1e-5, False, out.data_ptr())
    norm_row(x.data_ptr(), weight.data_ptr(), size, 1e-5, False, x.data_ptr())
    assert torch.equal(x, out)


@pytest.mark.parametrize("as_bf16", [False, True])
@pytest.mark.parametrize("at", [0, 15, 64, 79, 85])
def test_a_nan_anywhere_is_in_the_whole_norm(as_bf16, at):
    x, weight = torch.randn(86), torch.ones(86)
    x[at] = float("nan")
    out = torch.zeros(86, dtype=torch.bfloat16 if as_bf16 else torch.float32)
    norm_row(x.data_ptr(), weight.data_ptr(), 86, 1e-5, as_bf16, out.data_ptr())
    assert out.isnan().all()


@given(size=st.integers(1, 100))
def test_rows_are_added_in_place(size):
    x = torch.randn(size)
    out, area = guarded(size)
    out.copy_(torch.randn(size))
    expected = out + x
    add_row(x.data_ptr(), size, out.data_ptr())
    assert torch.equal(out, expected)
    assert_guards(area)


@given(half=st.integers(1, 128))
def test_halves_are_rotated_in_place(half):
    angle = torch.randn(half)
    x, area = guarded(2 * half)
    x.copy_(torch.randn(2 * half))
    low, high = x[:half].clone(), x[half:].clone()
    cos, sin = angle.cos(), angle.sin()
    rotate_head(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), 2 * half)
    assert torch.equal(x, torch.cat((low * cos - high * sin, high * cos + low * sin)))
    assert_guards(area)


@given(dtype=DTYPES, half_dim=st.integers(1, 40), half_block=st.integers(1, 24), is_last=st.booleans(), data=st.data())
@settings(deadline=None, max_examples=80)
def test_a_slot_is_written_where_the_layout_says_and_nowhere_else(dtype, half_dim, half_block, is_last, data):
    """K is [head_dim / w, slots, w], V [slots / w, head_dim, w]. A pair's second slot is cleared if nobody wrote it."""
    dim, block = 2 * half_dim, 2 * half_block - (dtype == torch.float32)
    slot, width, is_bf16 = data.draw(st.integers(0, block - 1)), 4 // dtype.itemsize, dtype == torch.bfloat16
    row, scratch = torch.randn(dim), torch.zeros(dim)
    row[0] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0]
    keys, values = (torch.full((block * dim,), SENTINEL, dtype=dtype) for _ in range(2))
    write_key(is_bf16, row.data_ptr(), dim, keys.data_ptr(), block, slot, scratch.data_ptr())
    write_value(is_bf16, row.data_ptr(), dim, values.data_ptr(), slot, is_last, scratch.data_ptr())
    by_slot = keys.view(dim // width, block, width).transpose(0, 1).reshape(block, dim)
    expected = torch.full((block, dim), SENTINEL, dtype=dtype)
    expected[slot] = row.to(dtype)
    torch.testing.assert_close(by_slot, expected, rtol=0, atol=0, equal_nan=True)
    if is_bf16 and is_last and slot % 2 == 0:
        expected[slot + 1] = 0
    by_slot = values.view(block // width, dim, width).transpose(1, 2).reshape(block, dim)
    torch.testing.assert_close(by_slot, expected, rtol=0, atol=0, equal_nan=True)
