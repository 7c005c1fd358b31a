"""The array always begins with the list that it follows."""

import ctypes

from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.block_table import BlockTable


def at_address(table: BlockTable, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(table.address))


@given(st.lists(st.tuples(st.sampled_from(["grow", "replace", "shrink"]), st.integers(0, 40))))
def test_a_table_follows_its_list(changes):
    table, block_ids, next_id = BlockTable(), [], 0
    for change, count in changes:
        new = list(range(next_id, next_id + count))
        next_id += count
        if change == "grow":
            block_ids += new
        elif change == "replace":
            block_ids = new
        else:
            del block_ids[count:]
        table.follow(block_ids)
        assert table.ids[: len(block_ids)].tolist() == block_ids
        assert at_address(table, len(block_ids)) == block_ids


def test_a_list_as_long_as_the_one_before_is_followed_too():
    table = BlockTable()
    table.follow([1, 2, 3])
    table.follow([4, 5, 6])
    assert at_address(table, 3) == [4, 5, 6]


def test_growth_moves_the_array_and_keeps_what_was_there():
    table, block_ids = BlockTable(), list(range(16))
    table.follow(block_ids)
    before = table.address
    block_ids.append(99)
    table.follow(block_ids)
    assert table.address != before
    assert at_address(table, 17) == [*range(16), 99]
