"""Attention on pages against its definition in fp64, and a row's bits against the same row computed otherwise.

Pages lie in random order; what was never written is NaN.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve_kernels.cpu.attention import (
    ARITHMETIC_DOT,
    ARITHMETIC_PAIRS,
    attend_unit,
    scratch_bytes,
    unit_positions,
    unit_rows,
)
from pdserve_kernels.cpu.simd import HAS_BF16_DOT

NAN = float("nan")
LOG2_E = 1.4426950408889634
BF16 = torch.bfloat16
bits = {torch.float32: torch.int32, BF16: torch.int16}


@dataclass(frozen=True)
class Shape:
    dtype: torch.dtype
    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    context: int
    window: int = 0
    arithmetic: int = ARITHMETIC_PAIRS

    @property
    def width(self) -> int:
        return 4 // self.dtype.itemsize


class Pages:
    """One sequence of `context` written positions: keys and values [context, kv_heads, head_dim], and queries."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        kv = (shape.context, shape.kv_heads, shape.head_dim)
        self.key, self.value = (torch.randn(kv, generator=generator).to(shape.dtype) for _ in range(2))
        heads = shape.kv_heads * shape.group
        self.query = 2 * torch.randn(shape.context, heads, shape.head_dim, generator=generator)
        count = -(-shape.context // shape.block_size)
        self.table = torch.randperm(count + 3, generator=generator)[:count].int()
        self.lay_out(shape.context)

    def lay_out(self, num_written: int) -> None:
        """The pool with positions before `num_written` only; a pair's second slot is zero if its first was written."""
        s = self.shape
        slots = len(self.table) * s.block_size
        key, value = (torch.full((slots, s.kv_heads, s.head_dim), NAN, dtype=s.dtype) for _ in range(2))
        key[:num_written], value[:num_written] = self.key[:num_written], self.value[:num_written]
        if s.width == 2 and num_written % 2:
            value[num_written] = 0
        by_page = (len(self.table), s.block_size, s.kv_heads, s.head_dim)
        key, value = key.view(by_page).transpose(1, 2), value.view(by_page).transpose(1, 2)
        self.pool = torch.full((len(self.table) + 3, 2, s.kv_heads, s.block_size * s.head_dim), NAN, dtype=s.dtype)
        self.pool[self.table.long(), 0] = key.unflatten(-1, (-1, s.width)).transpose(2, 3).flatten(2)
        self.pool[self.table.long(), 1] = value.unflatten(2, (-1, s.width)).transpose(3, 4).flatten(2)

    def unit(self, out: Tensor, position: int, num_positions: int, head: int, num_heads: int) -> None:
        """One call of the kernel; its scratch is as wild as the pages."""
        s, query = self.shape, self.query[position]
        scratch = torch.full((scratch_bytes(s.group, s.head_dim) // 4 + 16,), NAN)
        size = s.dtype.itemsize
        attend_unit.ctypes(
            s.arithmetic, s.dtype == BF16, num_positions, position, s.window, head, num_heads, s.group, s.kv_heads,
            s.head_dim, s.block_size, self.pool.data_ptr(), self.pool[0].numel() * size, self.table.data_ptr(),
            query.data_ptr(), query.numel() * 4, s.head_dim**-0.5 * LOG2_E, out.data_ptr(), query.numel() * size,
            scratch.data_ptr(),
        )  # fmt: skip

    def attend(self, start: int, end: int, most: int = 1000) -> Tensor:
        """Rows of positions start … end − 1, KV head by KV head, in units of at most `most` positions."""
        s = self.shape
        out = torch.full((end - start + 1, s.kv_heads * s.group * s.head_dim), 7.0, dtype=s.dtype)
        size = min(most, unit_positions(s.group))
        for first in range(start, end, size):
            for head in range(s.kv_heads):
                self.unit(out[first - start :], first, min(size, end - first), head, 1)
        assert (out[-1] == 7.0).all()
        return out[:-1]

    def attend_heads(self, position: int, at_once: int) -> Tensor:
        s = self.shape
        out = torch.full((1, s.kv_heads * s.group * s.head_dim), 7.0, dtype=s.dtype)
        for head in range(0, s.kv_heads, at_once):
            self.unit(out, position, 1, head, min(at_once, s.kv_heads - head))
        return out

    def exact(self, start: int, end: int) -> Tensor:
        s = self.shape
        key, value = (x.double().repeat_interleave(s.group, dim=1) for x in (self.key, self.value))
        scores = torch.einsum("nhd,thd->hnt", self.query[start:end].double(), key) * s.head_dim**-0.5
        age = torch.arange(start, end).unsqueeze(1) - torch.arange(s.context)
        scores.masked_fill_((age < 0) | (age >= (s.window or s.context)), float("-inf"))
        return torch.einsum("hnt,thd->nhd", scores.softmax(-1), value).flatten(1)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(bits[one.dtype]), other.view(bits[other.dtype]))


def assert_close(found: Tensor, expected: Tensor, shape: Shape) -> None:
    absolute = 0.03 if shape.arithmetic == ARITHMETIC_DOT else 3e-5
    relative = 2.0**-8 if shape.dtype == BF16 else 1e-5
    error = (found.double() - expected).abs()
    assert (error <= expected.abs() * relative + absolute).all(), error.max()


def shapes(arithmetic: int, most: int = 300) -> st.SearchStrategy[Shape]:
    dot = arithmetic == ARITHMETIC_DOT
    dtypes = st.just(BF16) if dot else st.sampled_from([torch.float32, BF16])
    dims = [16, 32, 64, 80, 128, 256] if dot else [4, 6, 8, 16, 24, 32, 64, 80, 96, 128, 256]
    contexts = st.one_of(st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129]), st.integers(1, most))
    return dtypes.flatmap(
        lambda dtype: st.builds(
            Shape,
            dtype=st.just(dtype),
            kv_heads=st.integers(1, 3),
            group=st.integers(1, 14),
            head_dim=st.sampled_from(dims),
            block_size=st.sampled_from([16, 32, 48] if dot else [2, 4, 16, 32, 48] + [1, 7] * (dtype != BF16)),
            context=contexts,
            window=st.sampled_from([0, 0, 1, 15, 64, 1000]),
            arithmetic=st.just(arithmetic),
        )
    )


KINDS = [ARITHMETIC_PAIRS] + [ARITHMETIC_DOT] * HAS_BF16_DOT
ANY_SHAPE = st.sampled_from(KINDS).flatmap(shapes)


@given(shape=ANY_SHAPE)
@settings(deadline=None, max_examples=60)
def test_attention_equals_its_definition(shape):
    pages = Pages(shape)
    start = max(0, shape.context - 90)
    assert_close(pages.attend(start, shape.context), pages.exact(start, shape.context), shape)


@given(shape=ANY_SHAPE, data=st.data())
@settings(deadline=None, max_examples=60)
def test_bits_of_a_row_depend_on_that_row_alone(shape, data):
    """In a chunk, in units of any size, by itself; later positions written or not; KV heads at once or one by one."""
    pages = Pages(shape)
    start = data.draw(st.integers(0, shape.context - 1))
    end = min(shape.context, start + 100)
    chunk = pages.attend(start, end)
    assert same_bits(pages.attend(start, end, data.draw(st.integers(1, 70))), chunk)
    for position in {start, end - 1, data.draw(st.integers(start, end - 1))}:
        alone = pages.attend(position, position + 1)
        assert same_bits(alone, chunk[position - start : position - start + 1])
        pages.lay_out(position + 1)
        assert same_bits(pages.attend(position, position + 1), alone)
        for at_once in range(2, shape.kv_heads + 1):
            if at_once * shape.group <= unit_rows(shape.group):
                assert same_bits(pages.attend_heads(position, at_once), alone)
        pages.lay_out(shape.context)


@given(shape=ANY_SHAPE, block_size=st.sampled_from([16, 32, 48]))
@settings(deadline=None, max_examples=40)
def test_bits_depend_on_neither_the_block_size_nor_a_window_that_hides_nothing(shape, block_size):
    pages = Pages(shape)
    position = shape.context - 1
    expected = pages.attend(position, shape.context)
    assert same_bits(Pages(replace(shape, block_size=block_size)).attend(position, shape.context), expected)
    if not shape.window or shape.window >= shape.context:
        wide = Pages(replace(shape, window=shape.context))
        assert same_bits(wide.attend(position, shape.context), expected)


@pytest.mark.parametrize("group", [1, 3, 13, 64, 193, 200])
def test_groups_larger_than_a_unit_have_room(group):
    shape = Shape(torch.float32, 2, group, 16, 16, 70)
    pages = Pages(shape)
    assert_close(pages.attend(60, 70), pages.exact(60, 70), shape)


@given(shape=ANY_SHAPE, scale=st.sampled_from([1e-30, 1e-3, 30.0, 1e4]), data=st.data())
@settings(deadline=None, max_examples=40)
def test_scores_of_any_size_give_finite_averages_of_values(shape, scale, data):
    pages = Pages(shape)
    pages.query *= scale
    start = data.draw(st.integers(0, shape.context - 1))
    found = pages.attend(start, min(shape.context, start + 20)).float()
    assert (found.abs() <= pages.value.float().abs().max() * (1 + 2.0**-7)).all()


@pytest.mark.parametrize("value", [NAN, float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, 15, 70, 99])
def test_a_key_that_is_no_number_reaches_the_rows_that_see_it_and_no_other(dtype, kind, value, at):
    shape = Shape(dtype, 2, 3, 64, 16, 100, 40, kind if dtype == BF16 else ARITHMETIC_PAIRS)
    pages = Pages(shape)
    clean = pages.attend(0, 100)
    pages.key[at, 1, 5] = value
    pages.lay_out(100)
    dirty = pages.attend(0, 100)
    position, head = torch.arange(100).unsqueeze(1), torch.arange(6).repeat_interleave(64)
    sees = (position >= at) & (position < at + 40) & (head >= 3)
    assert same_bits(dirty[~sees], clean[~sees])
    seeing = dirty[sees].view(-1, 3, 64).transpose(0, 1)
    sign = pages.query[at : min(100, at + 40), 3:, 5].sign().T
    hidden_by_minus_infinity = (sign * value == float("-inf")).unsqueeze(2)
    assert (seeing.isnan() | hidden_by_minus_infinity).all()


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_a_query_that_is_no_number_spoils_its_row_alone(dtype, value):
    for kind in KINDS if dtype == BF16 else KINDS[:1]:
        pages = Pages(Shape(dtype, 1, 2, 32, 16, 80, 0, kind))
        clean = pages.attend(40, 80)
        pages.query[50, 1, 7] = value
        dirty = pages.attend(40, 80)
        spoilt = torch.zeros_like(clean, dtype=torch.bool)
        spoilt[10, 32:] = True
        assert dirty[spoilt].isnan().all()
        assert same_bits(dirty[~spoilt], clean[~spoilt])


def test_a_written_nan_in_a_value_is_noticed():
    """The negative control of NaN in unwritten slots."""
    pages = Pages(Shape(BF16, 1, 2, 32, 16, 80))
    pages.value[33, 0, 4] = NAN
    pages.lay_out(80)
    assert (pages.attend(79, 80).isnan() == (torch.arange(64) % 32 == 4)).all()


def test_a_tile_that_depends_on_the_rows_is_noticed():
    """The negative control of equal bits: the same row with its positions merged in another order."""
    pages = Pages(Shape(torch.float32, 1, 1, 64, 16, 300))
    other = Pages(Shape(torch.float32, 1, 1, 64, 16, 300))
    other.key, other.value = pages.key.clone(), pages.value.clone()
    order = torch.cat((torch.arange(64, 299), torch.arange(64), torch.tensor([299])))
    other.key, other.value = pages.key[order], pages.value[order]
    other.query = pages.query
    other.lay_out(300)
    one, two = pages.attend(299, 300), other.attend(299, 300)
    torch.testing.assert_close(one, two)
    assert not same_bits(one, two)
