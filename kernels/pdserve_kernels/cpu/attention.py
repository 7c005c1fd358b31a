# pyright: basic
"""Attention over KV pages, decode and prefill alike; no page is gathered, and a row's bits depend on nothing but it.

A row is one query head at one position. It walks tiles of 64 absolute positions in order with a running maximum
(FlashAttention's online softmax; Dao et al., 2022), in fp32, base 2. A page's K is [head_dim / w, block_size, w] and
its V [block_size / w, head_dim, w], where w elements make up four bytes: so each four-byte column of K is one slot's,
and the query heads that share a KV head share every load.

Three arithmetics: F32 over fp32 pages, PAIRS over bf16 pages (the same, products exact), DOT over bf16 pages with
queries and weights rounded to bf16 (AVX512_BF16). Where many rows see a tile, or its shape is unusual, it is unpacked
to fp32 once (`_stage`), which changes no bit.
"""

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils

from pdserve_kernels.cpu import simd
from pdserve_kernels.cpu.compiled import CFUNC, JIT, signature
from pdserve_kernels.cpu.simd import (
    F32,
    I32,
    I64,
    LANES,
    VECTOR_BYTES,
    VF,
    VI,
    add,
    address,
    at,
    keep_lanes,
    largest_lane,
    load,
    load_bf16_scalar,
    load_even,
    load_float,
    load_int32,
    load_odd,
    maximum,
    multiply,
    operation,
    power_of_two,
    round_to_bf16,
    splat,
    store,
    store_bf16,
    store_bf16_scalar,
    store_float,
    subtract,
    sum_of_lanes,
)

ARITHMETIC_F32, ARITHMETIC_PAIRS, ARITHMETIC_DOT = 0, 1, 2

TILE = 64
UNIT_POSITIONS = 64
UNIT_ROWS = 192
"""A unit of work holds at most this many rows, or one position's."""
_SUB_BLOCKS = TILE // LANES
_SCORE_STRIDE = 4 * TILE
_DIRECT_ROWS = 8
_NEXT_TILE_CACHE = 2
"""All heads' parts of the next tile would not fit the first level."""
_LOWEST = np.float32(-3.0e38)

f32 = np.float32


def unit_rows(group_size: int) -> int:
    """Rows for which a thread's scratch must have room."""
    return max(UNIT_ROWS, group_size)


def unit_positions(group_size: int) -> int:
    """Query positions in one unit of work."""
    return max(1, min(UNIT_POSITIONS, UNIT_ROWS // group_size))


def scratch_bytes(group_size: int, head_dim: int) -> int:
    """What one thread needs: queries, results, maxima, sums, scores, weights as bf16, staged K and V."""
    width = 4 * (-(-head_dim // LANES) * LANES)
    rows = unit_rows(group_size)
    return 2 * rows * width + rows * (VECTOR_BYTES + 4) + 12 * _SCORE_STRIDE * 2 + 2 * TILE * width + VECTOR_BYTES


@njit(signature("i", "i"), **JIT)
def padded(head_dim):
    """To whole vectors."""
    return (head_dim + LANES - 1) // LANES * LANES


# --- micro-kernels ----------------------------------------------------------------------------------------------------

_ROWS = (12, 4, 3, 2, 1)


def _members(b, arithmetic, where, step):
    """The query's, or weight's, values of one step, broadcast."""
    if arithmetic == ARITHMETIC_PAIRS:
        base = b.add(where, b.mul(step, ir.Constant(I64, 8)))
        return [simd.broadcast(b, simd.read(b, at(b, base, 4 * i), F32)) for i in range(2)]
    base = b.add(where, b.mul(step, ir.Constant(I64, 4)))
    return [simd.broadcast(b, simd.read(b, base, F32 if arithmetic == ARITHMETIC_F32 else I32))]


def _operands(b, arithmetic, where):
    """What a vector in memory holds, one operand for each member."""
    if arithmetic == ARITHMETIC_F32:
        return [simd.read(b, where, VF)]
    words = simd.read(b, where, VI)
    if arithmetic == ARITHMETIC_DOT:
        return [words]
    return [simd.even_members(b, words), simd.odd_members(b, words)]


def _multiply_add(b, arithmetic, operands, members, slot):
    for operand, member in zip(operands, members, strict=True):
        if arithmetic == ARITHMETIC_DOT:
            b.store(simd.dot_bf16_pairs(b, b.load(slot), operand, member), slot)
        else:
            b.store(simd.multiply_add(b, operand, member, b.load(slot)), slot)


def _steps(b, count):
    return cgutils.for_range_slice(b, ir.Constant(I64, 0), count, ir.Constant(I64, 1), I64, inc=True)


def _emit_scores(b, arithmetic, num_rows, keys, nexts, operands):
    """Scores of rows × the sub-blocks at `keys`; the lines of `nexts` are fetched meanwhile."""
    queries, query_stride, key_stride, steps, scores = operands
    totals = [[cgutils.alloca_once(b, VF) for _ in keys] for _ in range(num_rows)]
    rows = [b.add(queries, b.mul(query_stride, ir.Constant(I64, r))) for r in range(num_rows)]
    for slot in (slot for row in totals for slot in row):
        b.store(simd.constant(0.0), slot)
    with _steps(b, steps) as (step, _):
        offset = b.mul(step, key_stride)
        loaded = [_operands(b, arithmetic, b.add(key, offset)) for key in keys]
        for following in nexts:
            simd.prefetch_line(b, b.add(following, offset), _NEXT_TILE_CACHE)
        for row, slots in zip(rows, totals, strict=True):
            members = _members(b, arithmetic, row, step)
            for key, slot in zip(loaded, slots, strict=True):
                _multiply_add(b, arithmetic, key, members, slot)
    for r, slots in enumerate(totals):
        for p, slot in enumerate(slots):
            simd.write(b, at(b, scores, r * _SCORE_STRIDE + p * VECTOR_BYTES), b.load(slot))


@operation(types.void, *(address for _ in range(15)))
def _scores(b, arithmetic, rows, *operands):
    """Scores of `rows` rows × 64 lanes. Operands: four keys, four next ones, queries, row bytes, key stride, steps,
    scores."""
    keys, nexts, (queries, query_stride, key_stride, steps, scores) = operands[:4], operands[4:8], operands[8:]
    for choice in (ARITHMETIC_F32, ARITHMETIC_PAIRS, ARITHMETIC_DOT):
        if choice == ARITHMETIC_DOT and not simd.HAS_BF16_DOT:
            continue
        for num_rows in _ROWS if choice != ARITHMETIC_PAIRS else _ROWS[1:]:
            chosen = b.and_(
                b.icmp_signed("==", arithmetic, ir.Constant(I64, choice)),
                b.icmp_signed("==", rows, ir.Constant(I64, num_rows)),
            )
            at_once = 2 if num_rows == 12 else 4
            with b.if_then(chosen):
                for p in range(0, _SUB_BLOCKS, at_once):
                    following = nexts[p : p + at_once] if choice != ARITHMETIC_F32 else ()
                    rest = (queries, query_stride, key_stride, steps, at(b, scores, p * VECTOR_BYTES))
                    _emit_scores(b, choice, num_rows, keys[p : p + at_once], following, rest)


def _emit_accumulate(b, arithmetic, num_rows, num_vectors, fetch, operands):
    weights, values, following, stride, steps, sums, sums_stride = operands
    rows = [b.add(weights, ir.Constant(I64, r * _SCORE_STRIDE)) for r in range(num_rows)]
    targets = [
        [at(b, b.add(sums, b.mul(sums_stride, ir.Constant(I64, r))), i * VECTOR_BYTES) for i in range(num_vectors)]
        for r in range(num_rows)
    ]
    totals = [[cgutils.alloca_once(b, VF) for _ in range(num_vectors)] for _ in range(num_rows)]
    for slots, places in zip(totals, targets, strict=True):
        for slot, place in zip(slots, places, strict=True):
            b.store(simd.read(b, place, VF), slot)
    with _steps(b, steps) as (step, _):
        offset = b.mul(step, stride)
        base = b.add(values, offset)
        loaded = [_operands(b, arithmetic, at(b, base, i * VECTOR_BYTES)) for i in range(num_vectors)]
        for i in range(num_vectors if fetch else 0):
            simd.prefetch_line(b, at(b, b.add(following, offset), i * VECTOR_BYTES), _NEXT_TILE_CACHE)
        for row, slots in zip(rows, totals, strict=True):
            members = _members(b, arithmetic, row, step)
            for value, slot in zip(loaded, slots, strict=True):
                _multiply_add(b, arithmetic, value, members, slot)
    for slots, places in zip(totals, targets, strict=True):
        for slot, place in zip(slots, places, strict=True):
            simd.write(b, place, b.load(slot))


@operation(types.void, *(address for _ in range(10)))
def _accumulate(b, arithmetic, rows, vectors, *operands):
    """Add weights · V to the sums of `rows` rows, 4 or 1 vectors wide. Operands: weights, V, next V, V stride, steps,
    sums, sums' row bytes."""
    weights, values, following, stride, steps, sums, sums_stride = operands
    for choice in (ARITHMETIC_F32, ARITHMETIC_PAIRS, ARITHMETIC_DOT):
        if choice == ARITHMETIC_DOT and not simd.HAS_BF16_DOT:
            continue
        for num_rows in _ROWS if choice != ARITHMETIC_PAIRS else _ROWS[1:]:
            for num_vectors in (4, 1):
                chosen = b.icmp_signed("==", arithmetic, ir.Constant(I64, choice))
                chosen = b.and_(chosen, b.icmp_signed("==", rows, ir.Constant(I64, num_rows)))
                chosen = b.and_(chosen, b.icmp_signed("==", vectors, ir.Constant(I64, num_vectors)))
                at_once = 6 if num_rows == 12 else num_rows
                with b.if_then(chosen):
                    for first in range(0, num_rows, at_once):
                        rest = (
                            at(b, weights, first * _SCORE_STRIDE),
                            values,
                            following,
                            stride,
                            steps,
                            b.add(sums, b.mul(sums_stride, ir.Constant(I64, first))),
                            sums_stride,
                        )
                        fetch = choice != ARITHMETIC_F32 and first == 0
                        _emit_accumulate(b, choice, at_once, num_vectors, fetch, rest)


@njit(signature("iiiiiiiiiiiiiii"), **JIT)
def _score_rows(arithmetic, rows, k0, k1, k2, k3, n0, n1, n2, n3, queries, query_stride, key_stride, steps, scores):
    """In one place, so that the micro-kernels' code is there once."""
    _scores(arithmetic, rows, k0, k1, k2, k3, n0, n1, n2, n3, queries, query_stride, key_stride, steps, scores)


# --- one row ----------------------------------------------------------------------------------------------------------


@njit(signature("iiiiiiii"), **JIT)
def _weigh_row(scores, first, end, highest, sum_lanes, sums, width, rounded):
    """Turn a row's scores of one tile into weights, in place, and its running values with them.

    Lanes outside first … end − 1 take no part. `rounded`: where the weights go as bf16, 0: nowhere.
    """
    if first > 0 or end < TILE:
        for p in range(_SUB_BLOCKS):
            where = scores + p * VECTOR_BYTES
            store(where, keep_lanes(load(where), first - p * LANES, end - p * LANES))
    best = load(scores)
    for p in range(1, _SUB_BLOCKS):
        best = maximum(best, load(scores + p * VECTOR_BYTES))
    old = load_float(highest)
    new = max(old, largest_lane(best))
    total = load(sum_lanes)
    if new != old:
        rescale = power_of_two(splat(f32(old - new)))
        total = multiply(total, rescale)
        for i in range(0, width, VECTOR_BYTES):
            store(sums + i, multiply(load(sums + i), rescale))
        store_float(highest, new)
    base = splat(f32(new))
    for p in range(_SUB_BLOCKS):
        where = scores + p * VECTOR_BYTES
        weight = power_of_two(subtract(load(where), base))
        if rounded != 0:
            weight = round_to_bf16(weight)
            store_bf16(rounded + p * VECTOR_BYTES // 2, weight)
        else:
            store(where, weight)
        total = add(total, weight)
    store(sum_lanes, total)


@njit(signature("ii", "i"), **JIT)
def _rows_at_once(num_left, limit):
    if num_left >= 12 and limit >= 12:
        return 12
    return min(num_left, 4)


# --- one unit of work -------------------------------------------------------------------------------------------------


@njit(signature("iiiii", "i"), **JIT)
def _page(pool, block_bytes, table, block_size, position):
    """Address of the layer's part of the block that holds a position."""
    return pool + load_int32(table + 4 * (position // block_size)) * block_bytes


@njit(signature("iiiiiiii"), **JIT)
def _stage_slot(is_bf16, page_keys, page_values, slot, block_size, head_dim, keys, values):
    for d in range(head_dim):
        if is_bf16:
            key = load_bf16_scalar(page_keys + (d // 2 * block_size + slot) * 4 + d % 2 * 2)
            value = load_bf16_scalar(page_values + (slot // 2 * head_dim + d) * 4 + slot % 2 * 2)
        else:
            key = load_float(page_keys + (d * block_size + slot) * 4)
            value = load_float(page_values + (slot * head_dim + d) * 4)
        store_float(keys + d * _SCORE_STRIDE, key)
        store_float(values + 4 * d, value)


@njit(signature("iiiiiiiiiiii"), **JIT)
def _stage(
    is_bf16, tile_start, num_slots, pool, block_bytes, table, block_size, head_dim, key_head, value_head, keys, values
):
    """Unpack a tile's first `num_slots` slots: K to fp32 [head_dim, 64], V to fp32 [64, padded head_dim]."""
    width = 4 * padded(head_dim)
    vectors = is_bf16 and block_size % LANES == 0 and head_dim % LANES == 0
    slot = 0
    while slot < num_slots:
        position = tile_start + slot
        within = position % block_size
        page = _page(pool, block_bytes, table, block_size, position)
        run = min(block_size - within, num_slots - slot)
        if vectors and within % LANES == 0 and slot % LANES == 0:
            for first in range(0, run, LANES):
                source = page + key_head + (within + first) * 4
                target = keys + (slot + first) * 4
                for _step in range(head_dim // 2):
                    store(target, load_even(source))
                    store(target + _SCORE_STRIDE, load_odd(source))
                    source += block_size * 4
                    target += 2 * _SCORE_STRIDE
            source = page + value_head + within // 2 * head_dim * 4
            target = values + slot * width
            for _pair in range(0, run, 2):
                for i in range(0, width, VECTOR_BYTES):
                    store(target + i, load_even(source + i))
                    store(target + width + i, load_odd(source + i))
                source += head_dim * 4
                target += 2 * width
        else:
            for s in range(run):
                _stage_slot(
                    is_bf16, page + key_head, page + value_head, within + s, block_size, head_dim,
                    keys + (slot + s) * 4, values + (slot + s) * width,
                )  # fmt: skip
        slot += run


@njit(signature("iiiiiiiiiiii"), **JIT)
def _weigh_rows(row, rows, group, position, window, tile_start, scores, highest, sum_lanes, sums, width, weights):
    for r in range(rows):
        at_position = position + (row + r) // group
        first = 0 if window == 0 else at_position - window + 1
        rounded = 0 if weights == 0 else weights + r * _SCORE_STRIDE
        _weigh_row(
            scores + r * _SCORE_STRIDE, first - tile_start, at_position + 1 - tile_start, highest + 4 * (row + r),
            sum_lanes + VECTOR_BYTES * (row + r), sums + width * (row + r), width, rounded,
        )  # fmt: skip


@njit(signature("iiiiiiiii"), **JIT)
def _accumulate_rows(arithmetic, rows, weights, values, following, stride, steps, sums, width):
    """All of the head's dimensions."""
    done = 0
    while done < width:
        vectors = 4 if width - done >= 4 * VECTOR_BYTES else 1
        _accumulate(
            arithmetic, rows, vectors, weights, values + done, following + done, stride, steps, sums + done, width
        )
        done += vectors * VECTOR_BYTES


@njit(signature("iiiiiiiiiiiiiiiiiii"), **JIT)
def _attend_staged(
    is_bf16, num_rows, group, position, window, pool, block_bytes, table, block_size, head_dim, key_head, value_head,
    queries, sums, highest, sum_lanes, scores, keys, values,
):  # fmt: skip
    """Tile by tile: unpack it, then all rows that see it."""
    width = 4 * padded(head_dim)
    end = position + (num_rows - 1) // group + 1
    start = 0 if window == 0 else max(0, position - window + 1) // TILE * TILE
    for tile_start in range(start, end, TILE):
        slots = min(TILE, end - tile_start)
        _stage(
            is_bf16, tile_start, slots, pool, block_bytes, table, block_size, head_dim, key_head, value_head, keys,
            values,
        )  # fmt: skip
        row = 0
        while row < num_rows:
            rows = _rows_at_once(num_rows - row, 12)
            last = position + (row + rows - 1) // group
            first_seen = 0 if window == 0 else position + row // group - window + 1
            if last >= tile_start and first_seen < tile_start + TILE:
                k0 = keys
                _score_rows(
                    0, rows, k0, k0 + VECTOR_BYTES, k0 + 2 * VECTOR_BYTES, k0 + 3 * VECTOR_BYTES, k0, k0, k0, k0,
                    queries + row * width, width, _SCORE_STRIDE, head_dim, scores,
                )  # fmt: skip
                _weigh_rows(row, rows, group, position, window, tile_start, scores, highest, sum_lanes, sums, width, 0)
                steps = min(slots, last + 1 - tile_start)
                _accumulate_rows(0, rows, scores, values, values, width, steps, sums + row * width, width)
            row += rows


@njit(signature("iiiii", "i"), **JIT)
def _pick(i, a, b, c, d):
    if i < 2:
        return a if i == 0 else b
    return c if i == 2 else d


@njit(signature("iiiii", "i"), **JIT)
def _sub_block(pool, block_bytes, table, block_size, sub):
    return _page(pool, block_bytes, table, block_size, sub * LANES)


@njit(signature("ii", "i"), **JIT)
def _slot_in_page(sub, block_size):
    return sub * LANES % block_size


@njit(signature("iiiiiiiiiiiiiiiiiii"), **JIT)
def _attend_direct(
    arithmetic, num_heads, num_rows, group, position, window, pool, block_bytes, table, block_size, head_dim,
    queries, query_stride, sums, highest, sum_lanes, scores, weights, values_offset,
):  # fmt: skip
    """Straight from the pages, where block size and head dimension are multiples of 16: tile by tile, all KV heads of
    the unit, whose parts of a page lie together. `num_rows` rows a head; `pool` is the first head's keys."""
    width = 4 * head_dim
    end = position + (num_rows - 1) // group + 1
    start = 0 if window == 0 else max(0, position - window + 1) // TILE * TILE
    step_slots = 1 if arithmetic == ARITHMETIC_F32 else 2
    head_bytes = block_size * width // step_slots
    last_sub = (end - 1) // LANES
    for tile_start in range(start, end, TILE):
        sub = tile_start // LANES
        p0 = _sub_block(pool, block_bytes, table, block_size, min(sub, last_sub))
        p1 = _sub_block(pool, block_bytes, table, block_size, min(sub + 1, last_sub))
        p2 = _sub_block(pool, block_bytes, table, block_size, min(sub + 2, last_sub))
        p3 = _sub_block(pool, block_bytes, table, block_size, min(sub + 3, last_sub))
        n0 = _sub_block(pool, block_bytes, table, block_size, min(sub + 4, last_sub))
        n1 = _sub_block(pool, block_bytes, table, block_size, min(sub + 5, last_sub))
        n2 = _sub_block(pool, block_bytes, table, block_size, min(sub + 6, last_sub))
        n3 = _sub_block(pool, block_bytes, table, block_size, min(sub + 7, last_sub))
        w0, w1 = _slot_in_page(sub, block_size) * 4, _slot_in_page(sub + 1, block_size) * 4
        w2, w3 = _slot_in_page(sub + 2, block_size) * 4, _slot_in_page(sub + 3, block_size) * 4
        for head in range(num_heads):
            keys, first_row = head * head_bytes, head * num_rows
            row = 0
            while row < num_rows:
                rows = _rows_at_once(num_rows - row, 12 if arithmetic == ARITHMETIC_DOT else 4)
                last = position + (row + rows - 1) // group
                first_seen = 0 if window == 0 else position + row // group - window + 1
                if last >= tile_start and first_seen < tile_start + TILE:
                    at_row = first_row + row
                    _score_rows(
                        arithmetic, rows, p0 + keys + w0, p1 + keys + w1, p2 + keys + w2, p3 + keys + w3,
                        n0 + keys + w0, n1 + keys + w1, n2 + keys + w2, n3 + keys + w3,
                        queries + at_row * query_stride, query_stride, block_size * 4, head_dim // step_slots, scores,
                    )  # fmt: skip
                    _weigh_rows(
                        row, rows, group, position, window, tile_start, scores, highest + 4 * first_row,
                        sum_lanes + VECTOR_BYTES * first_row, sums + width * first_row, width, weights,
                    )  # fmt: skip
                    slots = min(TILE, last + 1 - tile_start)
                    source = scores if weights == 0 else weights
                    source_step = VECTOR_BYTES if weights == 0 else VECTOR_BYTES // 2
                    for i in range((slots + LANES - 1) // LANES):
                        page, following = _pick(i, p0, p1, p2, p3), _pick(i, n0, n1, n2, n3)
                        inside = values_offset + keys + _pick(i, w0, w1, w2, w3) // 4 // step_slots * width
                        here = min(LANES, slots - i * LANES)
                        _accumulate_rows(
                            arithmetic, rows, source + i * source_step, page + inside, following + inside, width,
                            (here + step_slots - 1) // step_slots, sums + at_row * width, width,
                        )  # fmt: skip
                row += rows


@njit(signature("iiifii"), **JIT)
def _take_query(source, head_dim, lanes, scale, as_bf16, target):
    """One row's query · scale, zeros behind it."""
    factor = splat(f32(scale))
    if head_dim % LANES == 0:
        for d in range(0, head_dim, LANES):
            value = multiply(load(source + 4 * d), factor)
            if as_bf16:
                store_bf16(target + 2 * d, value)
            else:
                store(target + 4 * d, value)
        return
    for d in range(lanes):
        store_float(target + 4 * d, load_float(source + 4 * d) * f32(scale) if d < head_dim else f32(0.0))


@njit(**JIT)
def _store_part(value, is_bf16, target, count, scratch):
    """The first `count` lanes."""
    if count == LANES:
        if is_bf16:
            store_bf16(target, value)
        else:
            store(target, value)
        return
    store(scratch, value)
    for i in range(count):
        if is_bf16:
            store_bf16_scalar(target + 2 * i, load_float(scratch + 4 * i))
        else:
            store_float(target + 4 * i, load_float(scratch + 4 * i))


@cfunc(signature("iiiiiiiiiiiiiiiidiii"), **CFUNC)
def attend_unit(
    arithmetic, is_bf16, num_positions, position, window, head, num_heads, group, num_kv_heads, head_dim, block_size,
    pool, block_bytes, table, rows, row_stride, scale, out, out_stride, scratch,
):  # fmt: skip
    """The query heads of KV heads `head` … `head` + `num_heads` − 1 at `num_positions` positions from `position` on.

    `rows`: address of the first position's queries, fp32 and rotated, `row_stride` bytes a position. `pool`: address of
    the layer's part of block 0. `scale` has log2(e) in it. `out`: rows of heads · head_dim in the pages' dtype. More
    than one KV head at once: only for a single position.
    """
    per_head = num_positions * group
    num_rows = num_heads * per_head
    lanes = padded(head_dim)
    width = 4 * lanes
    capacity = max(UNIT_ROWS, group)
    queries = (scratch + VECTOR_BYTES - 1) // VECTOR_BYTES * VECTOR_BYTES
    sums = queries + capacity * width
    sum_lanes = sums + capacity * width
    scores = sum_lanes + capacity * VECTOR_BYTES
    weights = scores + 12 * _SCORE_STRIDE
    keys = weights + 12 * _SCORE_STRIDE
    values = keys + TILE * width
    highest = values + TILE * width
    head_bytes = block_size * head_dim * (2 if is_bf16 else 4)
    regular = block_size % LANES == 0 and head_dim % LANES == 0
    direct = regular and (per_head <= _DIRECT_ROWS or arithmetic == ARITHMETIC_DOT)
    dot = direct and arithmetic == ARITHMETIC_DOT
    query_stride = width // 2 if dot else width
    zero = splat(f32(0.0))
    for r in range(num_rows):
        at_head, at_position, in_group = head + r // per_head, r % per_head // group, r % group
        source = rows + at_position * row_stride + (at_head * group + in_group) * head_dim * 4
        _take_query(source, head_dim, lanes, scale, dot, queries + r * query_stride)
        store_float(highest + 4 * r, _LOWEST)
        store(sum_lanes + r * VECTOR_BYTES, zero)
        for i in range(0, width, VECTOR_BYTES):
            store(sums + r * width + i, zero)
    first_keys = pool + head * head_bytes
    if direct:
        kind = arithmetic if dot else (ARITHMETIC_PAIRS if is_bf16 else ARITHMETIC_F32)
        _attend_direct(
            kind, num_heads, per_head, group, position, window, first_keys, block_bytes, table, block_size, head_dim,
            queries, query_stride, sums, highest, sum_lanes, scores, weights if dot else 0, num_kv_heads * head_bytes,
        )  # fmt: skip
    else:
        for h in range(num_heads):
            first = h * per_head
            _attend_staged(
                is_bf16, per_head, group, position, window, pool, block_bytes, table, block_size, head_dim,
                (head + h) * head_bytes, (num_kv_heads + head + h) * head_bytes, queries + first * width,
                sums + first * width, highest + 4 * first, sum_lanes + first * VECTOR_BYTES, scores, keys, values,
            )  # fmt: skip
    element = 2 if is_bf16 else 4
    for r in range(num_rows):
        at_head, at_position, in_group = head + r // per_head, r % per_head // group, r % group
        target = out + at_position * out_stride + (at_head * group + in_group) * head_dim * element
        total = splat(f32(f32(1.0) / sum_of_lanes(load(sum_lanes + r * VECTOR_BYTES))))
        for i in range(0, lanes, LANES):
            value = multiply(load(sums + r * width + 4 * i), total)
            _store_part(value, is_bf16, target + i * element, min(LANES, head_dim - i), scores)
