"""Packed products against their definition in fp64; a row's bits, and a column's, whatever is computed beside them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit, types
from torch import Tensor

from pdserve_kernels.cpu import simd
from pdserve_kernels.cpu.compiled import signature
from pdserve_kernels.cpu.gemm import (
    ADD,
    GATE_GELU,
    GATE_SILU,
    STORE,
    TILE_BYTES,
    PackedWeight,
    _dot_bf16_by_fma,
    gemm,
    interleave_gate_up,
    pack,
)
from pdserve_kernels.cpu.simd import address, operation

UNIT_ROUNDOFF = 2.0**-24
SENTINEL = -77.0
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SHAPES = {"rows": st.integers(1, 40), "inner": st.integers(1, 70).map(lambda n: 2 * n), "columns": st.integers(1, 130)}
WEIGHT_ROWS = 100
bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def product(
    kind: int,
    x: Tensor,
    weight: PackedWeight,
    out: Tensor,
    bias: Tensor | None = None,
    blocks: tuple[int, int] | None = None,
) -> Tensor:
    """What `gemm` makes of `out` [rows, columns]; x may be a view of wider rows."""
    first, end = blocks or (0, weight.num_blocks)
    tile = torch.full((TILE_BYTES // 4,), float("nan"))
    gemm.ctypes(
        kind, x.dtype == torch.bfloat16, x.data_ptr(), x.stride(0) * x.element_size(), len(x), weight.address,
        weight.num_steps, first, end, 0 if bias is None else bias.data_ptr(), out.data_ptr(),
        out.stride(0) * out.element_size(), out.shape[1], tile.data_ptr(),
    )  # fmt: skip
    return out


def stored(x: Tensor, weight: PackedWeight, columns: int, bias: Tensor | None = None) -> Tensor:
    """Surrounded by sentinels, which must stay."""
    area = torch.full((len(x) + 2, columns + 40), SENTINEL)
    out = product(STORE, x, weight, area[1:-1, 20:-20], bias).clone()
    area[1:-1, 20:-20] = SENTINEL
    assert (area == SENTINEL).all()
    return out


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(bits[one.dtype]), other.contiguous().view(bits[other.dtype]))


class Problem:
    """Random operands; rows of x lie in wider ones, with NaN behind."""

    def __init__(self, dtype: torch.dtype, rows: int, inner: int, columns: int, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(rows + 41 * inner + 7919 * columns)
        wide = torch.full((rows, inner + 6), float("nan"), dtype=dtype)
        wide[:, :inner] = torch.randn(rows, inner, generator=generator) * scale
        self.x = wide[:, :inner]
        self.weight = (torch.randn(columns, inner, generator=generator) * scale).to(dtype)
        self.bias = torch.randn(-(-columns // 32) * 32, generator=generator) * scale**2
        self.packed = pack(self.weight)

    def exact(self) -> Tensor:
        return self.x.double() @ self.weight.double().T + self.bias[: len(self.weight)].double()

    def error_bound(self) -> Tensor:
        """Higham's γ of as many roundings as a chain has, times the sum of magnitudes; bf16 products may lose
        what is no normal number."""
        steps = self.x.shape[1] + 2
        sizes = self.x.double().abs() @ self.weight.double().abs().T + self.bias[: len(self.weight)].double().abs()
        return steps * (sizes * UNIT_ROUNDOFF * 1.01 + 2.0**-126)


@given(dtype=DTYPES, scale=st.sampled_from([1e-18, 1.0, 1e15]), **SHAPES)
@settings(deadline=None, max_examples=60)
def test_products_equal_their_definition(dtype, scale, rows, inner, columns):
    problem = Problem(dtype, rows, inner, columns, scale)
    found = stored(problem.x, problem.packed, columns, problem.bias)
    assert ((found.double() - problem.exact()).abs() <= problem.error_bound()).all()


@given(dtype=DTYPES, data=st.data(), **SHAPES)
@settings(deadline=None, max_examples=60)
def test_bits_depend_on_neither_other_rows_nor_the_share_of_columns(dtype, data, rows, inner, columns):
    problem = Problem(dtype, rows, inner, columns)
    whole = stored(problem.x, problem.packed, columns, problem.bias)
    first = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(first + 1, rows))
    assert same_bits(stored(problem.x[first:end], problem.packed, columns, problem.bias), whole[first:end])
    cut = 2 * data.draw(st.integers(0, problem.packed.num_blocks // 2))
    parts = torch.full((rows, columns), SENTINEL)
    product(STORE, problem.x, problem.packed, parts, problem.bias, (cut, problem.packed.num_blocks))
    assert (parts[:, : 16 * cut] == SENTINEL).all()
    assert same_bits(product(STORE, problem.x, problem.packed, parts, problem.bias, (0, cut)), whole)


def test_bits_of_a_plain_product_do_depend_on_other_rows():
    """The negative control: the same comparison, of torch's products of one row and of many."""
    x, weight = torch.randn(37, 576), torch.randn(960, 576)
    whole = x @ weight.T
    assert any(not same_bits(x[row : row + 1] @ weight.T, whole[row : row + 1]) for row in range(len(x)))


@given(dtype=DTYPES, **SHAPES)
@settings(deadline=None, max_examples=30)
def test_adding_is_a_product_stored_and_added(dtype, rows, inner, columns):
    problem = Problem(dtype, rows, inner, columns)
    before = torch.randn(rows, columns)
    expected = before + stored(problem.x, problem.packed, columns, problem.bias)
    area = torch.full((rows, columns + 20), SENTINEL)
    area[:, :columns] = before
    assert same_bits(product(ADD, problem.x, problem.packed, area[:, :columns], problem.bias), expected)
    assert (area[:, columns:] == SENTINEL).all()


def gated(kind: int, x: Tensor, gate_up: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(gate, up, result) of `gemm`, gate and up as fp32 before the activation, with their bias."""
    half, padded = len(gate_up) // 2, -(-len(gate_up) // 32) * 16
    mixed = None if bias is None else interleave_gate_up(bias)
    plain = stored(x, pack(torch.cat((gate_up[:half], gate_up[half:]))), 2 * half)
    if bias is not None:
        plain += bias
    out = torch.full((len(x), padded), SENTINEL, dtype=x.dtype)
    product(kind, x, pack(interleave_gate_up(gate_up)), out, mixed)
    assert (out[:, half:] == 0).all(), "columns that only fill a block up"
    return plain[:, :half], plain[:, half:], out[:, :half]


def activation(kind: int, gate: Tensor) -> Tensor:
    if kind == GATE_SILU:
        return torch.nn.functional.silu(gate.double())
    return torch.nn.functional.gelu(gate.double(), approximate="tanh")


@given(
    dtype=DTYPES,
    kind_and_bias=st.tuples(st.sampled_from([GATE_SILU, GATE_GELU]), st.booleans()),
    scale=st.sampled_from([1e-20, 0.1, 1.0, 30.0, 1e4, 1e9]),
    half=st.integers(1, 80),
    rows=SHAPES["rows"],
    inner=SHAPES["inner"],
)
@settings(deadline=None, max_examples=80)
def test_gates_equal_their_definition(dtype, kind_and_bias, scale, half, rows, inner):
    kind, has_bias = kind_and_bias
    generator = torch.Generator().manual_seed(half)
    x = (torch.randn(rows, inner, generator=generator) * scale).to(dtype)
    gate_up = (torch.randn(2 * half, inner, generator=generator) * inner**-0.5).to(dtype)
    bias = torch.randn(2 * half, generator=generator) if has_bias else None
    gate, up, found = gated(kind, x, gate_up, bias)
    expected = activation(kind, gate) * up.double()
    relative = 2.0**-8 if dtype == torch.bfloat16 else 2e-5
    tiny = 1e-35 + gate.double().abs() * up.double().abs() * 1e-12
    assert ((found.double() - expected).abs() <= expected.abs() * relative + tiny).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [STORE, ADD, GATE_SILU, GATE_GELU])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_no_number_stays_one_and_leaves_others_alone(dtype, kind, value):
    x, weight = torch.randn(21, 64).to(dtype), torch.randn(96, 64).abs().to(dtype)
    packed, columns = pack(weight), 96 if kind < GATE_SILU else 48
    out_dtype = torch.float32 if kind < GATE_SILU else dtype

    def run() -> Tensor:
        return product(kind, x, packed, torch.zeros(len(x), columns, dtype=out_dtype))

    for row in (0, 11, 12, 20):
        clean = run()
        kept = x[row, 5].clone()
        x[row, 5] = value
        dirty = run()
        x[row, 5] = kept
        others = torch.arange(len(x)) != row
        assert same_bits(dirty[others], clean[others])
        assert not dirty[row].isfinite().any()
        assert np.isinf(value) or dirty[row].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", [0, 1], ids=["gate", "up"])
def test_a_nan_in_gate_or_up_alone_is_one_in_the_result(dtype, which):
    gate_up = torch.randn(80, 32).to(dtype)
    gate_up[which * 40 + 17, 3] = float("nan")
    out = torch.zeros(5, 48, dtype=dtype)
    for kind in (GATE_SILU, GATE_GELU):
        product(kind, torch.randn(5, 32).to(dtype), pack(interleave_gate_up(gate_up)), out)
        assert (out.isnan() == (torch.arange(48) == 17)).all()


@operation(types.void, *(address for _ in range(4)))
def dot_by_fma(b, x, w, total, out):
    """One step of sixteen lanes."""
    words = [simd.read(b, where, simd.VI) for where in (x, w)]
    simd.write(b, out, _dot_bf16_by_fma(b, simd.read(b, total, simd.VF), *words))


@njit(signature("iiii"))
def call_dot_by_fma(x, w, total, out):
    dot_by_fma(x, w, total, out)


def test_without_bf16_dot_products_even_members_come_first_then_odd_ones():
    """Each product is exact in fp32, so one rounding a member."""
    x, w = torch.randn(2, 16, 2).bfloat16()
    total, out = torch.randn(16), torch.zeros(16)
    call_dot_by_fma(*(tensor.data_ptr() for tensor in (x, w, total, out)))
    first = (total.double() + x[:, 0].double() * w[:, 0].double()).float()
    assert torch.equal(out, (first.double() + x[:, 1].double() * w[:, 1].double()).float())


@given(dtype=DTYPES, rows=st.integers(1, 70), inner=st.integers(1, 20).map(lambda n: 2 * n))
@settings(deadline=None, max_examples=30)
def test_packed_weights_are_in_their_layout(dtype, rows, inner):
    weight = torch.randn(rows, inner).to(dtype)
    packed = pack(weight)
    per_step = 4 // weight.element_size()
    assert packed.num_blocks % 2 == 0
    assert packed.data.data_ptr() % 64 == 0
    values = packed.data.view(dtype).view(packed.num_blocks, packed.num_steps, 16, per_step)
    for row, column in ((0, 0), (rows - 1, inner - 1), (rows // 2, inner // 3)):
        assert values[row // 16, column // per_step, row % 16, column % per_step] == weight[row, column]
    assert np.count_nonzero(values.float()) == np.count_nonzero(weight.float())
