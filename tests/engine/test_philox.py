"""Known answers of Random123's philox4x32-10 (kat_vectors), and the shape of the uniform numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.philox import philox4x32, uniform

FULL = 0xFFFFFFFF
U32 = st.integers(0, FULL)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, expected):
    assert philox4x32(counter, key) == expected


@given(st.integers(0, 2**64 - 1), U32, st.integers(0, 127))
def test_uniform_is_a_24_bit_fraction_of_the_documented_counter_and_key(seed, position, choice):
    first = philox4x32((position, choice, 0, 0), (seed & FULL, seed >> 32))[0]
    assert uniform(seed, position, choice) == (first >> 8) / 2**24
    assert 0 <= uniform(seed, position, choice) < 1


def test_uniform_numbers_spread_evenly():
    numbers = [uniform(7, position, 0) for position in range(4096)]
    counts = [sum(i / 8 <= number < (i + 1) / 8 for number in numbers) for i in range(8)]
    assert max(counts) - min(counts) < 150
    assert uniform(7, 0, 0) != uniform(7, 0, 1) != uniform(8, 0, 0)
