import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.core.ids import SequenceId
from pdserve.engine.block_pool import BlockPool, Owner, OwnerKind

A = Owner(OwnerKind.SEQUENCE, SequenceId(1, 1))
B = Owner(OwnerKind.OUTBOUND, SequenceId(1, 1))


def test_allocate_takes_all_or_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(RuntimeError, match="4 blocks wanted"):
        pool.allocate(4, A)
    assert pool.num_free_blocks == 3
    assert sorted(pool.allocate(3, A)) == [0, 1, 2]


def test_double_free_and_foreign_free_are_caught_and_change_nothing() -> None:
    pool = BlockPool(4)
    block_ids = pool.allocate(2, A)
    with pytest.raises(RuntimeError, match="belongs to"):
        pool.free(block_ids, B)
    with pytest.raises(RuntimeError, match="twice"):
        pool.free([block_ids[0], block_ids[0]], A)
    pool.free(block_ids, A)
    with pytest.raises(RuntimeError, match="belongs to None"):
        pool.free(block_ids, A)
    assert pool.num_free_blocks == 4
    pool.check_integrity()


def test_hand_over_changes_the_owner_without_freeing() -> None:
    pool = BlockPool(4)
    block_ids = pool.allocate(2, A)
    pool.hand_over(block_ids, A, B)
    assert pool.num_owned(OwnerKind.OUTBOUND) == 2
    assert pool.num_free_blocks == 2
    with pytest.raises(RuntimeError, match="belongs to"):
        pool.hand_over(block_ids, A, B)


def test_check_integrity_notices_a_lost_block() -> None:
    pool = BlockPool(4)
    pool._free.popleft()
    with pytest.raises(RuntimeError, match=r"\{0: 0\}"):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Owners come and go; every block always has exactly one place."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(16)
        self.held: list[tuple[list[int], Owner]] = []

    @rule(num_blocks=st.integers(0, 20), kind=st.sampled_from(OwnerKind), number=st.integers(1, 4))
    def allocate(self, num_blocks: int, kind: OwnerKind, number: int) -> None:
        owner = Owner(kind, SequenceId(1, number))
        if self.pool.can_allocate(num_blocks):
            self.held.append((self.pool.allocate(num_blocks, owner), owner))
        else:
            with pytest.raises(RuntimeError):
                self.pool.allocate(num_blocks, owner)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.held:
            block_ids, owner = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.pool.free(block_ids, owner)

    @rule(data=st.data(), kind=st.sampled_from(OwnerKind))
    def hand_over(self, data: st.DataObject, kind: OwnerKind) -> None:
        if self.held:
            index = data.draw(st.integers(0, len(self.held) - 1))
            block_ids, old = self.held[index]
            new = Owner(kind, old.sequence_id)
            self.pool.hand_over(block_ids, old, new)
            self.held[index] = (block_ids, new)

    @invariant()
    def every_block_is_somewhere(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free_blocks + sum(len(block_ids) for block_ids, _ in self.held) == 16


TestPoolMachine = PoolMachine.TestCase


@given(st.lists(st.integers(1, 4), max_size=10))
def test_blocks_are_reused_oldest_first(sizes: list[int]) -> None:
    pool = BlockPool(64)
    freed: list[int] = []
    for size in sizes:
        block_ids = pool.allocate(size, A)
        assert not set(block_ids) & set(freed)
        pool.free(block_ids, A)
        freed += block_ids
