"""One run of memory, given out piece by piece."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.model.area import Area, aligned


@given(st.lists(st.integers(0, 5000), max_size=20))
def test_pieces_are_apart_aligned_and_zeroed_and_fill_what_was_foreseen(sizes: list[int]) -> None:
    area = Area(sum(aligned(size) for size in sizes))
    pieces = [area.take(size) for size in sizes]
    assert area.num_free_bytes == 0
    assert all(len(piece) == size and not piece.any() for piece, size in zip(pieces, sizes, strict=True))
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces if len(piece))
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert all(torch.equal(piece, torch.full_like(piece, number)) for number, piece in enumerate(pieces))


def test_no_more_is_given_than_there_is() -> None:
    area = Area(192)
    area.take(65)
    with pytest.raises(RuntimeError, match="65 bytes are wanted of an area with 64 left"):
        area.take(65)
    assert len(area.take(64)) == 64


def test_a_piece_outlives_its_area() -> None:
    piece = Area(1 << 20).take(1 << 20)
    assert not piece.fill_(3).ne(3).any()
