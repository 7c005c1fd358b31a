# pyright: basic
"""Matrix products with packed weights: x · Wᵀ, what is done with each result, and how weights are packed.

A packed weight is [blocks][steps][16 rows][4 bytes]: a step is one fp32, or a pair of bf16, of the inner dimension, so
that both kinds are read alike. Each result is one chain of multiply-adds over the inner dimension, whatever tile it
lies in: a row's bits do not depend on the other rows. The micro-kernel's form is the usual one of BLIS (Van Zee and van
de Geijn, 2015): a tile of results stays in registers while a panel of weights streams by.
"""

from dataclasses import dataclass

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from torch import Tensor

from pdserve_kernels.cpu import simd
from pdserve_kernels.cpu.compiled import CFUNC, JIT, signature
from pdserve_kernels.cpu.simd import (
    I32,
    I64,
    LANES,
    VECTOR_BYTES,
    VF,
    VI,
    add,
    address,
    at,
    divide,
    fma,
    load,
    load_float,
    multiply,
    operation,
    power_of_two,
    splat,
    store,
    store_bf16,
    store_float,
)
from pdserve_kernels.host_memory import huge_empty

STORE, ADD, GATE_SILU, GATE_GELU = 0, 1, 2, 3
"""What becomes of results: stored as fp32; added to fp32; or (gate and up alternate by block) gated and stored."""

TILE_BLOCKS = 6
TILE_STRIDE = TILE_BLOCKS * VECTOR_BYTES
TILE_BYTES = 12 * TILE_STRIDE
"""Scratch that `gemm` needs."""
_PREFETCH_BYTES = 2048
_PREFETCH_CACHE = 2

f32 = np.float32


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """`data`: uint8, huge pages. `num_blocks` of 16 rows, even; rows past the weight's own are zero."""

    data: Tensor
    num_blocks: int
    num_steps: int

    @property
    def address(self) -> int:
        return self.data.data_ptr()


def packed_bytes(rows: int, inner: int, itemsize: int) -> int:
    """Of a packed weight [rows, inner] whose values take `itemsize` bytes."""
    return _num_blocks(rows) * (inner * itemsize // 4) * VECTOR_BYTES


def pack(weight: Tensor, data: Tensor | None = None) -> PackedWeight:
    """[out, in], bf16 (with `in` even) or fp32, in the packed layout; `data`: uint8 [packed_bytes], else new memory."""
    rows, inner = weight.shape
    if data is None:
        data = huge_empty(packed_bytes(rows, inner, weight.element_size()))
    words = weight.contiguous().view(torch.int32)
    num_blocks, steps, full = _num_blocks(rows), words.shape[1], rows // LANES
    packed = data.view(torch.int32).view(num_blocks, steps, LANES)
    packed[full:] = 0
    packed[:full] = words[: full * LANES].view(full, LANES, steps).transpose(1, 2)
    if rows % LANES:
        packed[full, :, : rows % LANES] = words[full * LANES :].t()
    return PackedWeight(data, num_blocks, steps)


def _num_blocks(rows: int) -> int:
    return -(-rows // (2 * LANES)) * 2


def interleave_gate_up(gate_up: Tensor) -> Tensor:
    """[2F, …], gate then up → 16 rows of gate, 16 of up, 16 of gate, …; F is padded with zeros to whole blocks."""
    half = gate_up.shape[0] // 2
    blocks = -(-half // LANES)
    mixed = gate_up.new_zeros(blocks, 2, LANES, *gate_up.shape[1:])
    for which in range(2):
        rows = gate_up[which * half : (which + 1) * half]
        padded = rows.new_zeros(blocks * LANES, *rows.shape[1:])
        padded[:half] = rows
        mixed[:, which] = padded.view(blocks, LANES, *rows.shape[1:])
    return mixed.flatten(0, 2)


def _dot_f32(b, total, x, w):
    return simd.multiply_add(b, b.bitcast(w, VF), b.bitcast(x, VF), total)


def _dot_bf16_by_fma(b, total, x, w):
    """Where the processor has no bf16 dot product: even members, then odd ones."""
    total = simd.multiply_add(b, simd.even_members(b, w), simd.even_members(b, x), total)
    return simd.multiply_add(b, simd.odd_members(b, w), simd.odd_members(b, x), total)


def _dot_bf16(b, total, x, w):
    return simd.dot_bf16_pairs(b, total, w, x)


_SHAPES = ((12, 2), (8, 3), (8, 2), (4, 6), (4, 2), (2, 6), (2, 2), (1, 6), (1, 2))
"""Rows × blocks of results that stay in registers at once."""


def _emit_tile(b, shape, dot, operands):
    num_rows, num_blocks = shape
    x, x_stride, w, w_stride, steps, tile = operands
    totals = [[cgutils.alloca_once(b, VF) for _ in range(num_blocks)] for _ in range(num_rows)]
    rows = [b.add(x, b.mul(x_stride, ir.Constant(I64, r))) for r in range(num_rows)]
    blocks = [b.add(w, b.mul(w_stride, ir.Constant(I64, p))) for p in range(num_blocks)]
    for slot in (slot for row in totals for slot in row):
        b.store(simd.constant(0.0), slot)
    with cgutils.for_range_slice(b, ir.Constant(I64, 0), steps, ir.Constant(I64, 1), I64, inc=True) as (step, _):
        offset = b.mul(step, ir.Constant(I64, VECTOR_BYTES))
        weights = [simd.read(b, b.add(block, offset), VI) for block in blocks]
        for block in blocks:
            simd.prefetch_line(b, at(b, b.add(block, offset), _PREFETCH_BYTES), _PREFETCH_CACHE)
        for row, slots in zip(rows, totals, strict=True):
            member = simd.broadcast(b, simd.read(b, b.add(row, b.mul(step, ir.Constant(I64, 4))), I32))
            for weight, slot in zip(weights, slots, strict=True):
                b.store(dot(b, b.load(slot), member, weight), slot)
    for r, slots in enumerate(totals):
        for p, slot in enumerate(slots):
            simd.write(b, at(b, tile, r * TILE_STRIDE + p * VECTOR_BYTES), b.load(slot))


@operation(types.void, *(address for _ in range(9)))
def _tile(b, is_bf16, rows, blocks, *operands):
    """The micro-kernel, of one of `_SHAPES`; operands: x, x row bytes, w, w block bytes, steps, tile."""
    for shape in _SHAPES:
        num_rows, num_blocks = (ir.Constant(I64, number) for number in shape)
        chosen = b.and_(b.icmp_signed("==", rows, num_rows), b.icmp_signed("==", blocks, num_blocks))
        with b.if_then(chosen), b.if_else(b.icmp_signed("!=", is_bf16, ir.Constant(I64, 0))) as (then, otherwise):
            with then:
                _emit_tile(b, shape, _dot_bf16 if simd.HAS_BF16_DOT else _dot_bf16_by_fma, operands)
            with otherwise:
                _emit_tile(b, shape, _dot_f32, operands)


@njit(signature("i", "i"), **JIT)
def _rows_of_tile(num_left):
    if num_left >= 12:
        return 12
    if num_left >= 8:
        return 8
    return 4 if num_left >= 4 else min(num_left, 2)


@njit(signature("ii", "i"), **JIT)
def _blocks_of_tile(rows, num_left):
    if rows == 12:
        return 2
    if rows == 8:
        return 3 if num_left >= 3 else 2
    return 6 if num_left >= 6 else 2


@njit(**JIT)
def gate(kind, value):
    """SiLU, g / (1 + exp(−g)), or GELU in its tanh form, which is g / (1 + exp(−2y))."""
    if kind == GATE_SILU:
        exponent = multiply(value, splat(f32(-1.4426950408889634)))
    else:
        square = multiply(value, value)
        inner = fma(multiply(square, splat(f32(0.044715))), value, value)
        exponent = multiply(inner, splat(f32(-2.302208198144325)))  # −2 · √(2/π) · log2(e)
    return divide(value, add(splat(f32(1.0)), power_of_two(exponent)))


@njit(signature("iiii"), **JIT)
def _finish_part(kind, values, target, num_left):
    """A block that reaches beyond the last column."""
    for i in range(num_left):
        value = load_float(values + 4 * i)
        if kind == ADD:
            value = load_float(target + 4 * i) + value
        store_float(target + 4 * i, value)


@njit(signature("iiiiiiiiii"), **JIT)
def _finish(kind, is_bf16, tile, rows, first, blocks, bias, out, out_stride, num_out):
    """Use a tile's results: `rows` rows from `out` on, blocks from `first` on."""
    for r in range(rows):
        row = tile + r * TILE_STRIDE
        target = out + r * out_stride
        if kind >= GATE_SILU:
            for p in range(0, blocks, 2):
                x, up = load(row + p * VECTOR_BYTES), load(row + (p + 1) * VECTOR_BYTES)
                if bias != 0:
                    x = add(x, load(bias + (first + p) * VECTOR_BYTES))
                    up = add(up, load(bias + (first + p + 1) * VECTOR_BYTES))
                gated = multiply(gate(kind, x), up)
                column = (first + p) // 2 * LANES
                if is_bf16:
                    store_bf16(target + 2 * column, gated)
                else:
                    store(target + 4 * column, gated)
            continue
        for p in range(blocks):
            column = (first + p) * LANES
            value = load(row + p * VECTOR_BYTES)
            if bias != 0:
                value = add(value, load(bias + 4 * column))
            if column + LANES <= num_out:
                if kind == ADD:
                    value = add(load(target + 4 * column), value)
                store(target + 4 * column, value)
            else:
                store(row + p * VECTOR_BYTES, value)
                _finish_part(kind, row + p * VECTOR_BYTES, target + 4 * column, num_out - column)


@cfunc(signature("iiiiiiiiiiiiii"), **CFUNC)
def gemm(kind, is_bf16, x, x_stride, num_rows, w, steps, first, end, bias, out, out_stride, num_out, tile):
    """Results of `num_rows` rows of x and blocks `first` to `end` − 1 of a packed weight, both numbers even.

    Addresses: x (rows of `x_stride` bytes, in the weight's dtype), w, `bias` (fp32 in the blocks' order, 0: none),
    `out` (rows of `out_stride` bytes and `num_out` columns: fp32, or the weight's dtype where gated), and a scratch
    `tile` of TILE_BYTES. `steps` · 4 bytes of each row are used.
    """
    for panel in range(first, end, TILE_BLOCKS):
        blocks = min(TILE_BLOCKS, end - panel)
        row = 0
        while row < num_rows:
            rows = _rows_of_tile(num_rows - row)
            p = 0
            while p < blocks:
                width = _blocks_of_tile(rows, blocks - p)
                weights = w + (panel + p) * steps * VECTOR_BYTES
                _tile(
                    is_bf16, rows, width, x + row * x_stride, x_stride, weights, steps * VECTOR_BYTES, steps,
                    tile + p * VECTOR_BYTES,
                )  # fmt: skip
                p += width
            _finish(kind, is_bf16, tile, rows, panel, blocks, bias, out + row * out_stride, out_stride, num_out)
            row += rows
