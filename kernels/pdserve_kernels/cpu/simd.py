# pyright: basic
"""Sixteen-lane vectors for numba: a value type and operations that build LLVM vector instructions. No kernel here.

Memory is named by address (int64, bytes). Nothing is fast-math: every fma is explicit, so what is computed for one row
does not depend on how rows are blocked. LLVM splits the vectors where the machine's are narrower.
"""

import inspect
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
VECTOR_BYTES = 4 * LANES
HAS_BF16_DOT = bool(llvm.get_host_cpu_features().get("avx512bf16"))

F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
VF, VI, VH = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES), ir.VectorType(I16, LANES)


class _BFloat(ir.Type):
    """llvmlite has no bfloat; LLVM's intrinsics want vectors of it."""

    intrinsic_name = "bf16"

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    def __hash__(self):
        return hash("bfloat")


VB = ir.VectorType(_BFloat(), 2 * LANES)


class _VectorType(types.Type):
    def __init__(self):
        super().__init__(name="float32x16")


vector = _VectorType()
address = types.int64


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, frontend_type):
        super().__init__(manager, frontend_type, VF)


def operation(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of a function that is given the IR builder and the operands, and builds its instructions."""

    def register(build):
        def define(_typing, *_operands):
            def generate(context, builder, _signature, operands):
                value = build(builder, *operands)
                return context.get_dummy_value() if value is None else value

            return result(*parameters), generate

        define.__name__ = build.__name__
        define.__doc__ = build.__doc__
        setattr(define, "__signature__", _signature(len(parameters)))  # noqa: B010
        return intrinsic(define)

    return register


def _signature(num_operands):
    """numba reads the number of operands off it."""
    names = ["typing", *(f"operand_{i}" for i in range(num_operands))]
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])


# --- building blocks for intrinsics: `b` is the IR builder ------------------------------------------------------------


def constant(value, kind=VF):
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [value] * kind.count)
    return ir.Constant(kind, value)


def at(b, base, offset):
    """base + offset, where offset is a number."""
    return b.add(base, ir.Constant(I64, offset)) if offset else base


def read(b, where, kind, align=4):
    value = b.load(b.inttoptr(where, kind.as_pointer()))
    value.align = align
    return value


def write(b, where, value, align=4):
    done = b.store(value, b.inttoptr(where, value.type.as_pointer()))
    done.align = align


def call(b, name, result, operands):
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), operands)


def broadcast(b, value):
    kind = ir.VectorType(value.type, LANES)
    undefined = ir.Constant(kind, ir.Undefined)
    first = b.insert_element(undefined, value, ir.Constant(I32, 0))
    return b.shuffle_vector(first, undefined, constant(0, VI))


def multiply_add(b, x, y, z):
    """x · y + z, rounded once."""
    return call(b, "llvm.fma.v16f32", VF, [x, y, z])


def even_members(b, pairs):
    """Of sixteen pairs of bf16, the first ones, as fp32."""
    return b.bitcast(b.shl(pairs, constant(16, VI)), VF)


def odd_members(b, pairs):
    return b.bitcast(b.and_(pairs, constant(-65536, VI)), VF)


def dot_bf16_pairs(b, total, x, y):
    """total + the dot product of each lane's two bf16; needs AVX512_BF16."""
    return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", VF, [total, b.bitcast(x, VB), b.bitcast(y, VB)])


def prefetch_line(b, where, locality):
    """Fetch a line into the first-level cache (locality 3) or the second (2)."""
    pointer = b.inttoptr(where, ir.IntType(8).as_pointer())
    hint = [ir.Constant(I32, 0), ir.Constant(I32, locality), ir.Constant(I32, 1)]
    call(b, "llvm.prefetch.p0", ir.VoidType(), [pointer, *hint])


def rounded_to_bf16(b, value):
    """fp32 lanes' bits after rounding to nearest even, the bf16 in the upper half; a NaN stays one."""
    bits = b.bitcast(value, VI)
    odd = b.and_(b.lshr(bits, constant(16, VI)), constant(1, VI))
    rounded = b.add(bits, b.add(odd, constant(0x7FFF, VI)))
    is_nan = b.fcmp_unordered("uno", value, value)
    return b.select(is_nan, b.or_(bits, constant(0x400000, VI)), rounded)


def larger(b, x, y):
    """The larger; x if either is a NaN."""
    return b.select(b.fcmp_unordered(">", x, y), x, y)


def reduce_lanes(b, value, combine):
    """A fixed tree over the lanes."""
    for distance in (8, 4, 2, 1):
        order = ir.Constant(VI, [lane ^ distance for lane in range(LANES)])
        value = combine(value, b.shuffle_vector(value, value, order))
    return b.extract_element(value, ir.Constant(I32, 0))


_EXP2 = (1.0, 0.69314718, 0.24022348, 0.05550357, 0.009666374, 0.0013390867)
"""2^r on [−1/2, 1/2], 1 at 0: fitted at Chebyshev nodes, relative error at most 2.7e-7, rounding included."""


def exp2(b, x):
    """2^x by lane; 0 below −126, 2^127 above 127; a NaN stays one."""
    low, high = constant(-126.0), constant(127.0)
    within = b.select(b.fcmp_unordered("<", x, high), x, high)
    clamped = larger(b, within, low)
    whole = call(b, "llvm.nearbyint.v16f32", VF, [clamped])
    rest = b.fsub(clamped, whole)
    total = constant(float(np.float32(_EXP2[-1])))
    for coefficient in reversed(_EXP2[:-1]):
        total = multiply_add(b, total, rest, constant(float(np.float32(coefficient))))
    exponent = b.shl(b.fptosi(whole, VI), constant(23, VI))
    power = b.bitcast(b.add(b.bitcast(total, VI), exponent), VF)
    return b.select(b.fcmp_unordered(">", x, low), power, constant(0.0))


# --- operations for kernels -------------------------------------------------------------------------------------------


@operation(vector, address)
def load(b, where):
    return read(b, where, VF)


@operation(types.void, address, vector)
def store(b, where, value):
    write(b, where, value)


@operation(vector, address)
def load_bf16(b, where):
    """Sixteen bf16 that lie together."""
    return b.bitcast(b.shl(b.zext(read(b, where, VH, 2), VI), constant(16, VI)), VF)


@operation(types.void, address, vector)
def store_bf16(b, where, value):
    write(b, where, b.trunc(b.lshr(rounded_to_bf16(b, value), constant(16, VI)), VH), 2)


@operation(vector, address)
def load_even(b, where):
    """Of sixteen pairs of bf16, the first ones."""
    return even_members(b, read(b, where, VI))


@operation(vector, address)
def load_odd(b, where):
    """Of sixteen pairs of bf16, the second ones."""
    return odd_members(b, read(b, where, VI))


@operation(vector, types.float32)
def splat(b, value):
    return broadcast(b, value)


@operation(vector, vector, vector, vector)
def fma(b, x, y, z):
    return multiply_add(b, x, y, z)


@operation(vector, vector, vector)
def add(b, x, y):
    return b.fadd(x, y)


@operation(vector, vector, vector)
def subtract(b, x, y):
    return b.fsub(x, y)


@operation(vector, vector, vector)
def multiply(b, x, y):
    return b.fmul(x, y)


@operation(vector, vector, vector)
def divide(b, x, y):
    return b.fdiv(x, y)


@operation(vector, vector, vector)
def maximum(b, x, y):
    return larger(b, x, y)


@operation(vector, vector)
def power_of_two(b, x):
    return exp2(b, x)


@operation(types.float32, vector)
def largest_lane(b, value):
    return reduce_lanes(b, value, lambda x, y: larger(b, x, y))


@operation(types.float32, vector)
def sum_of_lanes(b, value):
    return reduce_lanes(b, value, b.fadd)


@operation(vector, vector, types.int64, types.int64)
def keep_lanes(b, value, first, end):
    """Lanes outside first … end − 1 become −inf."""
    lanes = ir.Constant(VI, list(range(LANES)))
    above = b.icmp_signed(">=", lanes, broadcast(b, b.trunc(first, I32)))
    below = b.icmp_signed("<", lanes, broadcast(b, b.trunc(end, I32)))
    return b.select(b.and_(above, below), value, constant(float("-inf")))


@operation(types.float32, address)
def load_float(b, where):
    return read(b, where, F32)


@operation(types.void, address, types.float32)
def store_float(b, where, value):
    write(b, where, value)


@operation(types.float32, address)
def load_bf16_scalar(b, where):
    return b.bitcast(b.shl(b.zext(read(b, where, I16, 2), I32), ir.Constant(I32, 16)), F32)


@operation(types.void, address, types.float32)
def store_bf16_scalar(b, where, value):
    rounded = b.extract_element(rounded_to_bf16(b, broadcast(b, value)), ir.Constant(I32, 0))
    write(b, where, b.trunc(b.lshr(rounded, ir.Constant(I32, 16)), I16), 2)


@operation(types.void, address, address)
def copy_half(b, target, source):
    """Two bytes."""
    write(b, target, read(b, source, I16, 2), 2)


@operation(types.void, address, address)
def copy_half_and_clear_next(b, target, source):
    """Two bytes, and two zero ones behind them."""
    write(b, target, b.zext(read(b, source, I16, 2), I32))


@operation(types.int64, address)
def load_int32(b, where):
    return b.sext(read(b, where, I32), I64)


@operation(types.int64, address)
def load_int64(b, where):
    return read(b, where, I64, 8)


@operation(types.void, address, types.int64)
def store_int64(b, where, value):
    write(b, where, value, 8)


@operation(types.int64, address)
def take_ticket(b, where):
    """Adds one to the int64 at an address, atomically; what it was before. A release and an acquire."""
    return b.atomic_rmw("add", b.inttoptr(where, I64.as_pointer()), ir.Constant(I64, 1), "acq_rel")


@operation(types.int64, address)
def load_int64_acquire(b, where):
    return b.load_atomic(b.inttoptr(where, I64.as_pointer()), "acquire", 8)


@operation(types.void, address, types.int64)
def store_int64_release(b, where, value):
    b.store_atomic(value, b.inttoptr(where, I64.as_pointer()), "release", 8)


@operation(types.void)
def spin_pause(b):
    """Tells the processor that this is a loop that waits."""
    call(b, "llvm.x86.sse2.pause", ir.VoidType(), [])


@operation(types.int64)
def cycles(b):
    """The processor's time-stamp counter."""
    return call(b, "llvm.readcyclecounter", I64, [])


@operation(types.voidptr, address)
def pointer(b, where):
    return b.inttoptr(where, ir.IntType(8).as_pointer())


@operation(types.void, address)
def call_function(b, function):
    """Call the C function `void (void)` at an address."""
    kind = ir.FunctionType(ir.VoidType(), [])
    b.call(b.inttoptr(function, kind.as_pointer()), [])


@operation(types.int64, address)
def call_int_function(b, function):
    """Call the C function `int (void)` at an address."""
    kind = ir.FunctionType(I32, [])
    return b.sext(b.call(b.inttoptr(function, kind.as_pointer()), []), I64)


@operation(types.void, address, address)
def copy_word(b, target, source):
    """Four bytes."""
    write(b, target, read(b, source, I32))


@operation(vector, vector)
def round_to_bf16(b, value):
    """The nearest bf16, as fp32."""
    return b.bitcast(b.and_(rounded_to_bf16(b, value), constant(-65536, VI)), VF)


def call_by_address(kind: Any) -> Any:
    """An operation (address, operands…) that calls the C function of the numba signature `kind` at an address."""
    forms = {types.int64: I64, types.float32: F32, types.float64: ir.DoubleType()}
    c_kind = ir.FunctionType(ir.VoidType(), [forms[parameter] for parameter in kind.args])

    @operation(types.void, address, *kind.args)
    def invoke(b, function, *operands):
        b.call(b.inttoptr(function, c_kind.as_pointer()), operands)

    return invoke
