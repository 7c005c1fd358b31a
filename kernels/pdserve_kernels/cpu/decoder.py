# pyright: basic
"""A whole decoder step as one compiled function, run by every thread of a team at once. Decides nothing.

Between phases the threads meet at a barrier; within one they share rows, blocks of weights, or units of attention. The
caller holds no lock meanwhile: Python's other threads run.
"""

from numba import carray, cfunc, njit, types  # type: ignore[attr-defined]

from pdserve_kernels.cpu.compiled import CFUNC, JIT, signature
from pdserve_kernels.cpu.gemm import ADD, GATE_SILU, STORE
from pdserve_kernels.cpu.job import JOB, LAYER, UNIT
from pdserve_kernels.cpu.meeting import meet
from pdserve_kernels.cpu.rows import add_row, embed_row, norm_row, place_of, rotate_head, write_key, write_value
from pdserve_kernels.cpu.simd import (
    LANES,
    call_by_address,
    call_int_function,
    cycles,
    load_int32,
    load_int64,
    pointer,
    store_int64,
    take_ticket,
)

UNIT_BYTES = UNIT.itemsize
LOG2_E = 1.4426950408889634

call_gemm = call_by_address(signature("iiiiiiiiiiiiii"))
call_attend = call_by_address(signature("iiiiiiiiiiiiiiiidiii"))


@njit(**JIT)
def _meet(job):
    if job.num_threads > 1:
        meet(job.meeting, job.num_threads, job.give_way)


@njit(**JIT)
def _share(count, thread, num_threads):
    """(first, end) of the thread's part of `count` things."""
    return count * thread // num_threads, count * (thread + 1) // num_threads


@njit(**JIT)
def _norm_rows(job, thread, weight):
    """x = norm of the residual stream, in the weights' dtype."""
    first, end = _share(job.num_rows, thread, job.num_threads)
    for row in range(first, end):
        source = job.residual + row * job.hidden_size * 4
        norm_row(source, weight, job.hidden_size, job.eps, job.is_bf16, job.x + row * job.x_stride)


@njit(**JIT)
def _blocks(num_out):
    return (num_out + 2 * LANES - 1) // (2 * LANES) * 2


@njit(**JIT)
def _project(job, thread, kind, x, x_stride, num_in, num_out, weight, bias, out):
    """x · weightᵀ of all rows, this thread's blocks. Gated: `num_out` counts what is left, half of the columns."""
    columns = num_out if kind < GATE_SILU else 2 * num_out
    first, end = _share(_blocks(columns) // 2, thread, job.num_threads)
    element = 2 if job.is_bf16 and kind >= GATE_SILU else 4
    steps = num_in // 2 if job.is_bf16 else num_in
    call_gemm(
        job.gemm, kind, job.is_bf16, x, x_stride, job.num_rows, weight, steps, 2 * first, 2 * end, bias, out,
        num_out * element, num_out, job.scratch + thread * job.scratch_stride,
    )  # fmt: skip
    _meet(job)


@njit(**JIT)
def _project_residual(job, thread, x, x_stride, num_in, weight, bias, norm):
    """residual += x · weightᵀ, through a norm where the model has one behind it."""
    size = job.hidden_size
    if norm == 0:
        _project(job, thread, ADD, x, x_stride, num_in, size, weight, bias, job.residual)
        return
    _project(job, thread, STORE, x, x_stride, num_in, size, weight, bias, job.delta)
    first, end = _share(job.num_rows, thread, job.num_threads)
    for row in range(first, end):
        delta = job.delta + row * size * 4
        norm_row(delta, norm, size, job.eps, False, delta)
        add_row(delta, size, job.residual + row * size * 4)
    _meet(job)


@njit(**JIT)
def _rotate_and_write(job, thread, layer, index):
    """Rotate queries in place; rotated keys, and values, go into their pages."""
    heads, kv_heads, dim = job.num_heads, job.num_kv_heads, job.head_dim
    scratch = job.scratch + thread * job.scratch_stride
    element = 2 if job.is_bf16 else 4
    head_bytes = job.block_size * dim * element
    first, end = _share(job.num_rows, thread, job.num_threads)
    for row in range(first, end):
        position = load_int32(job.positions + 4 * row)
        cos, sin = layer.cos + position * dim // 2 * 4, layer.sin + position * dim // 2 * 4
        values = job.qkv + row * (heads + 2 * kv_heads) * dim * 4
        for head in range(heads + kv_heads):
            x = values + head * dim * 4
            norm = layer.query_norm if head < heads else layer.key_norm
            if norm != 0:
                norm_row(x, norm, dim, job.eps, False, x)
            rotate_head(x, cos, sin, dim)
        table = load_int64(job.tables + 8 * load_int32(job.row_sequences + 4 * row))
        block, slot = place_of(table, job.block_size, position)
        page = job.pool + block * job.block_bytes + index * job.layer_bytes
        is_last = load_int32(job.row_is_last + 4 * row) != 0
        for head in range(kv_heads):
            key, value = values + (heads + head) * dim * 4, values + (heads + kv_heads + head) * dim * 4
            write_key(job.is_bf16, key, dim, page + head * head_bytes, job.block_size, slot, scratch)
            write_value(job.is_bf16, value, dim, page + (kv_heads + head) * head_bytes, slot, is_last, scratch)


@njit(**JIT)
def _attend(job, thread, layer, index):
    """Units are taken one by one: late ones of a long prompt cost more than early ones."""
    kv_heads = job.num_kv_heads
    row_stride = (job.num_heads + 2 * kv_heads) * job.head_dim * 4
    while True:
        number = take_ticket(job.tickets + 8 * index)
        if number >= job.num_units:
            return
        unit = job.units + number * UNIT_BYTES
        row = load_int32(unit)
        call_attend(
            job.attend, job.attention, job.is_bf16, load_int32(unit + 4), load_int32(job.positions + 4 * row),
            layer.window, load_int32(unit + 12), load_int32(unit + 16), job.num_heads // kv_heads, kv_heads,
            job.head_dim, job.block_size, job.pool + index * job.layer_bytes, job.block_bytes,
            load_int64(job.tables + 8 * load_int32(unit + 8)), job.qkv + row * row_stride, row_stride,
            job.attention_scale * LOG2_E, job.x + row * job.x_stride, job.x_stride,
            job.scratch + thread * job.scratch_stride,
        )  # fmt: skip


@njit(**JIT)
def _embed(job, thread):
    first, end = _share(job.num_rows, thread, job.num_threads)
    for row in range(first, end):
        token_id = load_int32(job.token_ids + 4 * row)
        out = job.residual + row * job.hidden_size * 4
        embed_row(job.is_bf16, job.embedding, token_id, job.hidden_size, job.embedding_scale, out)


@njit(**JIT)
def _return_tickets(job):
    """Nobody takes one before the first barrier."""
    for index in range(job.num_layers):
        store_int64(job.tickets + 8 * index, 0)


@njit(**JIT)
def _run_layers(job, layers, thread):
    hidden, dim = job.hidden_size, job.head_dim
    inner = (job.intermediate_size + LANES - 1) // LANES * LANES
    inner_stride = inner * (2 if job.is_bf16 else 4)
    num_qkv = (job.num_heads + 2 * job.num_kv_heads) * dim
    begin = cycles()
    gemm_cycles = attention_cycles = 0
    _embed(job, thread)
    if thread == 0:
        _return_tickets(job)
    for index in range(job.num_layers):
        layer = layers[index]
        _norm_rows(job, thread, layer.attention_norm)
        _meet(job)
        t0 = cycles()
        _project(job, thread, STORE, job.x, job.x_stride, hidden, num_qkv, layer.qkv, layer.qkv_bias, job.qkv)
        t1 = cycles()
        _rotate_and_write(job, thread, layer, index)
        _meet(job)
        t2 = cycles()
        _attend(job, thread, layer, index)
        _meet(job)
        t3 = cycles()
        _project_residual(
            job, thread, job.x, job.x_stride, job.num_heads * dim, layer.attention_out, layer.attention_out_bias,
            layer.attention_out_norm,
        )  # fmt: skip
        t4 = cycles()
        _norm_rows(job, thread, layer.mlp_norm)
        _meet(job)
        t5 = cycles()
        _project(
            job, thread, GATE_SILU + job.activation, job.x, job.x_stride, hidden, inner, layer.gate_up,
            layer.gate_up_bias, job.gated,
        )  # fmt: skip
        _project_residual(
            job, thread, job.gated, inner_stride, job.intermediate_size, layer.down, layer.down_bias, layer.down_norm
        )
        gemm_cycles += t1 - t0 + (t4 - t3) + (cycles() - t5)
        attention_cycles += t3 - t2
    if thread == 0:
        job.cycles_gemm += gemm_cycles
        job.cycles_attention += attention_cycles
        job.cycles_other += cycles() - begin - gemm_cycles - attention_cycles


@njit(**JIT)
def _sample_logits(job, thread):
    """Final norm of the rows that are sampled, then the head."""
    begin = cycles()
    first, end = _share(job.num_samples, thread, job.num_threads)
    for i in range(first, end):
        source = job.residual + load_int32(job.sample_rows + 4 * i) * job.hidden_size * 4
        norm_row(source, job.final_norm, job.hidden_size, job.eps, job.is_bf16, job.x + i * job.x_stride)
    _meet(job)
    t0 = cycles()
    first, end = _share(_blocks(job.vocab_size) // 2, thread, job.num_threads)
    steps = job.hidden_size // 2 if job.is_bf16 else job.hidden_size
    call_gemm(
        job.gemm, STORE, job.is_bf16, job.x, job.x_stride, job.num_samples, job.head, steps, 2 * first, 2 * end, 0,
        job.logits, job.vocab_size * 4, job.vocab_size, job.scratch + thread * job.scratch_stride,
    )  # fmt: skip
    _meet(job)
    if thread == 0:
        job.cycles_gemm += cycles() - t0
        job.cycles_other += t0 - begin


@njit(**JIT)
def _enter(job):
    """The thread's number. OpenMP says how many came, which may be fewer than were asked for; all write the same."""
    if job.thread_number == 0:
        return 0
    job.num_threads = call_int_function(job.thread_count)
    return call_int_function(job.thread_number)


@cfunc(types.void(types.voidptr), **CFUNC)
def run_step(where):
    """One step of all layers, then `sample_logits`, if any are wanted: `where` is a JOB's address. For every thread of
    the team."""
    job = carray(where, 1, JOB)[0]
    thread = _enter(job)
    _run_layers(job, carray(pointer(job.layers), job.num_layers, LAYER), thread)
    if job.num_samples > 0:
        _sample_logits(job, thread)


@cfunc(types.void(types.voidptr), **CFUNC)
def sample_logits(where):
    """fp32 logits [num_samples, vocab_size] of rows of the residual stream: `where` is a JOB's address."""
    job = carray(where, 1, JOB)[0]
    _sample_logits(job, _enter(job))
