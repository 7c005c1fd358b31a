# pyright: basic
"""What a decoder does row by row: embedding, RMS norm, rotation, and the write into KV pages."""

import numpy as np
from numba import njit

from pdserve_kernels.cpu.compiled import JIT, signature
from pdserve_kernels.cpu.simd import (
    LANES,
    VECTOR_BYTES,
    add,
    copy_half,
    copy_half_and_clear_next,
    copy_word,
    fma,
    load,
    load_bf16_scalar,
    load_float,
    load_int32,
    multiply,
    splat,
    store,
    store_bf16,
    store_bf16_scalar,
    store_float,
    subtract,
    sum_of_lanes,
)

f32 = np.float32


@njit(signature("iiiidi"), **JIT)
def embed_row(is_bf16, table, token_id, size, scale, out):
    """fp32 embedding · scale; `table` is packed as the head's weight is, so that tied ones are held once."""
    steps = size // 2 if is_bf16 else size
    source = table + (token_id // LANES * steps * LANES + token_id % LANES) * 4
    for step in range(steps):
        if is_bf16:
            store_float(out + 8 * step, load_bf16_scalar(source) * f32(scale))
            store_float(out + 8 * step + 4, load_bf16_scalar(source + 2) * f32(scale))
        else:
            store_float(out + 4 * step, load_float(source) * f32(scale))
        source += VECTOR_BYTES


@njit(signature("iid", "f"), **JIT)
def _inverse_rms(x, size, eps):
    """Four sums side by side, then a tree; the order is the same for every row."""
    a = b = c = d = splat(f32(0.0))
    i = 0
    while i + 4 * LANES <= size:
        va, vb = load(x + 4 * i), load(x + 4 * i + VECTOR_BYTES)
        vc, vd = load(x + 4 * i + 2 * VECTOR_BYTES), load(x + 4 * i + 3 * VECTOR_BYTES)
        a, b, c, d = fma(va, va, a), fma(vb, vb, b), fma(vc, vc, c), fma(vd, vd, d)
        i += 4 * LANES
    while i + LANES <= size:
        va = load(x + 4 * i)
        a = fma(va, va, a)
        i += LANES
    total = sum_of_lanes(add(add(a, b), add(c, d)))
    for rest in range(i, size):
        value = load_float(x + 4 * rest)
        total += value * value
    return f32(1.0) / np.sqrt(total / f32(size) + f32(eps))


@njit(signature("iiidii"), **JIT)
def norm_row(x, weight, size, eps, as_bf16, out):
    """x / √(mean(x²) + eps) · weight: fp32 in, fp32 or bf16 out; may be done in place."""
    factor = _inverse_rms(x, size, eps)
    factors = splat(factor)
    whole = size // LANES * LANES
    for i in range(0, whole, LANES):
        value = multiply(multiply(load(x + 4 * i), factors), load(weight + 4 * i))
        if as_bf16:
            store_bf16(out + 2 * i, value)
        else:
            store(out + 4 * i, value)
    for i in range(whole, size):
        scalar = load_float(x + 4 * i) * factor * load_float(weight + 4 * i)
        if as_bf16:
            store_bf16_scalar(out + 2 * i, scalar)
        else:
            store_float(out + 4 * i, scalar)


@njit(signature("iii"), **JIT)
def add_row(x, size, out):
    """out += x, fp32."""
    whole = size // LANES * LANES
    for i in range(0, whole, LANES):
        store(out + 4 * i, add(load(out + 4 * i), load(x + 4 * i)))
    for i in range(whole, size):
        store_float(out + 4 * i, load_float(out + 4 * i) + load_float(x + 4 * i))


@njit(signature("iiii"), **JIT)
def rotate_head(x, cos, sin, head_dim):
    """Rotate the halves of a head, fp32, in place."""
    half = head_dim // 2
    whole = half // LANES * LANES
    for i in range(0, whole, LANES):
        low, high = load(x + 4 * i), load(x + 4 * (half + i))
        c, s = load(cos + 4 * i), load(sin + 4 * i)
        store(x + 4 * i, subtract(multiply(low, c), multiply(high, s)))
        store(x + 4 * (half + i), add(multiply(high, c), multiply(low, s)))
    for i in range(whole, half):
        low, high = load_float(x + 4 * i), load_float(x + 4 * (half + i))
        c, s = load_float(cos + 4 * i), load_float(sin + 4 * i)
        store_float(x + 4 * i, low * c - high * s)
        store_float(x + 4 * (half + i), high * c + low * s)


@njit(signature("iii"), **JIT)
def _round_row(x, size, out):
    whole = size // LANES * LANES
    for i in range(0, whole, LANES):
        store_bf16(out + 2 * i, load(x + 4 * i))
    for i in range(whole, size):
        store_bf16_scalar(out + 2 * i, load_float(x + 4 * i))


@njit(signature("iiiiiii"), **JIT)
def write_key(is_bf16, key, head_dim, page, block_size, slot, scratch):
    """One head's key, fp32, into its column of a page; `scratch`: head_dim · 4 bytes."""
    if not is_bf16:
        for d in range(head_dim):
            copy_word(page + (d * block_size + slot) * 4, key + 4 * d)
        return
    _round_row(key, head_dim, scratch)
    for pair in range(head_dim // 2):
        copy_word(page + (pair * block_size + slot) * 4, scratch + 4 * pair)


@njit(signature("iiiiiii"), **JIT)
def write_value(is_bf16, value, head_dim, page, slot, is_last, scratch):
    """One head's value, fp32, into its slot. Slots come in pairs: a chunk's last one clears the slot behind it, so that
    nothing that was there can reach a product with a weight of zero."""
    if not is_bf16:
        target = page + slot * head_dim * 4
        for d in range(head_dim):
            copy_word(target + 4 * d, value + 4 * d)
        return
    _round_row(value, head_dim, scratch)
    target = page + (slot // 2 * head_dim) * 4 + slot % 2 * 2
    if is_last and slot % 2 == 0:
        for d in range(head_dim):
            copy_half_and_clear_next(target + 4 * d, scratch + 2 * d)
    else:
        for d in range(head_dim):
            copy_half(target + 4 * d, scratch + 2 * d)


@njit(**JIT)
def place_of(table, block_size, position):
    """(block, slot) of a position."""
    return load_int32(table + 4 * (position // block_size)), position % block_size
