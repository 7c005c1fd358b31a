"""Operations on sixteen lanes, each against a plain definition."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from pdserve_kernels.cpu import simd
from pdserve_kernels.cpu.compiled import signature
from pdserve_kernels.cpu.simd import LANES, VECTOR_BYTES

NAN_BITS = (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000, 0x7F80FFFF)
EDGE_BITS = (0, 0x80000000, 1, 0x7FFF, 0x8000, 0x8001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x3F808000)


@njit(signature("iii"))
def powers(source, target, count):
    for i in range(0, 4 * count, VECTOR_BYTES):
        simd.store(target + i, simd.power_of_two(simd.load(source + i)))


@njit(signature("iiiii"))
def round_all(source, as_vectors, as_scalars, in_place, count):
    for i in range(0, count, LANES):
        value = simd.load(source + 4 * i)
        simd.store_bf16(as_vectors + 2 * i, value)
        simd.store(in_place + 4 * i, simd.round_to_bf16(value))
        for lane in range(i, i + LANES):
            simd.store_bf16_scalar(as_scalars + 2 * lane, simd.load_float(source + 4 * lane))


@njit(signature("iiii"))
def keep(source, target, first, end):
    simd.store(target, simd.keep_lanes(simd.load(source), first, end))


@njit(signature("ii"))
def reduce_and_split(source, target):
    simd.store_float(target, simd.sum_of_lanes(simd.load(source)))
    simd.store_float(target + 4, simd.largest_lane(simd.load(source)))
    simd.store(target + VECTOR_BYTES, simd.load_even(source))
    simd.store(target + 2 * VECTOR_BYTES, simd.load_odd(source))
    simd.store(target + 3 * VECTOR_BYTES, simd.load_bf16(source))


@njit(signature("i", "i"))
def next_ticket(where):
    return simd.take_ticket(where)


def power_of_two(values: np.ndarray) -> np.ndarray:
    """By the operation, of any number of values."""
    padded = np.zeros(-(-len(values) // LANES) * LANES, dtype=np.float32)
    padded[: len(values)] = values
    out = np.empty_like(padded)
    powers(padded.ctypes.data, out.ctypes.data, len(padded))
    return out[: len(values)]


def test_powers_of_two_are_exact_to_two_units_over_their_range():
    whole_range = np.linspace(-126, 127, 1 << 20, dtype=np.float32)[1:-1]
    around_zero = np.linspace(-1, 1, 1 << 18, dtype=np.float32)
    for x in (whole_range, around_zero, np.ldexp(np.float32(1), np.arange(-140, 0)).astype(np.float32)):
        expected = np.exp2(x.astype(np.float64))
        assert (np.abs(power_of_two(x) - expected) / expected).max() < 2.7e-7


def test_whole_powers_are_exact():
    x = np.arange(-125, 128, dtype=np.float32)
    np.testing.assert_array_equal(power_of_two(x), np.ldexp(np.float32(1), np.arange(-125, 128)))
    assert power_of_two(np.float32([0.0, -0.0])).tolist() == [1.0, 1.0]


def test_powers_beyond_the_range_are_held_at_its_ends():
    low = np.float32([-126, -126.5, -1000, -3e38, -np.inf])
    assert (power_of_two(low) == 0).all()
    assert (power_of_two(np.float32([127, 127.5, 1000, 3e38, np.inf])) == 2.0**127).all()


def test_a_nan_has_no_power():
    assert np.isnan(power_of_two(np.uint32(NAN_BITS).view(np.float32))).all()


def test_rounding_to_bf16_is_torchs_and_a_nan_stays_one():
    """Every upper half with lower halves on, beside and far from ties; a NaN's payload may lie in the lower half."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    bits = (upper | np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).ravel()
    bits = np.concatenate([bits, np.uint32(NAN_BITS + EDGE_BITS)])
    bits = np.resize(bits, -(-len(bits) // LANES) * LANES)
    vectors, scalars = np.empty((2, len(bits)), dtype=np.uint16)
    in_place = np.empty_like(bits)
    round_all(bits.ctypes.data, vectors.ctypes.data, scalars.ctypes.data, in_place.ctypes.data, len(bits))
    np.testing.assert_array_equal(scalars, vectors)
    np.testing.assert_array_equal(in_place, vectors.astype(np.uint32) << 16)
    expected = torch.from_numpy(bits.view(np.float32)).bfloat16()
    found = torch.from_numpy(vectors.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(found[numbers].view(torch.int16), expected[numbers].view(torch.int16))


@given(st.integers(-70, 70), st.integers(-70, 70))
def test_lanes_outside_the_kept_ones_are_hidden_whatever_they_hold(first, end):
    values = np.uint32(NAN_BITS[:4] * 4).view(np.float32)
    out = np.empty(LANES, dtype=np.float32)
    keep(values.ctypes.data, out.ctypes.data, first, end)
    kept = (np.arange(LANES) >= first) & (np.arange(LANES) < end)
    np.testing.assert_array_equal(out.view(np.uint32)[kept], values.view(np.uint32)[kept])
    assert (out[~kept] == -np.inf).all()


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=LANES, max_size=LANES))
def test_lanes_are_added_in_a_tree_compared_and_split(values):
    x = np.float32(values)
    out = np.empty((4, LANES), dtype=np.float32)
    reduce_and_split(x.ctypes.data, out.ctypes.data)
    tree = x.copy()
    for distance in (8, 4, 2, 1):
        tree = tree + tree[np.arange(LANES) ^ distance]
    assert out[0, 0] == tree[0]
    assert out[0, 1] == x.max()
    halves = x.view(np.uint16).astype(np.uint32) << 16
    np.testing.assert_array_equal(out[1].view(np.uint32), halves[::2])
    np.testing.assert_array_equal(out[2].view(np.uint32), halves[1::2])
    np.testing.assert_array_equal(out[3].view(np.uint32), halves[:LANES])


def test_tickets_are_numbered():
    counter = np.zeros(1, dtype=np.int64)
    assert [next_ticket(counter.ctypes.data) for _ in range(3)] == [0, 1, 2]
