"""The prefix index as the pool uses it: hits, references, eviction, and what must never be shared."""

from collections.abc import Sequence as Seq

import pytest

from pdserve.core.block_keys import Digest, KeyChain, xxh3_128
from pdserve.core.ids import SequenceId
from pdserve.engine.block_pool import BlockPool, OutOfBlocksError, Owner, OwnerKind

BLOCK = 2


def owner(number: int) -> Owner:
    return Owner(OwnerKind.SEQUENCE, SequenceId(1, number))


def constant(_: bytes) -> bytes:
    """The worst digest there is."""
    return b"same"


def chain_of(token_ids: Seq[int], root: bytes = b"root", digest: Digest = xxh3_128) -> KeyChain:
    chain = KeyChain(root, BLOCK, digest)
    chain.extend(token_ids, len(token_ids) // BLOCK)
    return chain


def cached(pool: BlockPool, number: int, chain: KeyChain) -> list[int]:
    """Compute and publish a sequence's full blocks, as its owner does who found nothing; still held."""
    block_ids = pool.allocate(len(chain.keys), owner(number))
    assert pool.publish(chain, block_ids, 0, len(block_ids), owner(number)) == len(block_ids)
    return block_ids


def test_the_longest_cached_run_is_found_and_held() -> None:
    pool = BlockPool(8)
    block_ids = cached(pool, 1, chain_of([1, 2, 3, 4, 5, 6]))
    pool.free(block_ids, owner(1))
    assert (pool.num_free_blocks, pool.num_empty_blocks, pool.num_cached_blocks) == (8, 5, 3)
    other = chain_of([1, 2, 3, 4, 9, 9])
    assert pool.num_cached(other, 3) == 2
    assert pool.acquire(other, 3, owner(2)) == block_ids[:2]
    assert (pool.num_free_blocks, pool.num_cached_blocks) == (6, 1)
    assert pool.acquire(other, 1, owner(3)) == block_ids[:1]
    with pytest.raises(RuntimeError, match="already"):
        pool.acquire(other, 1, owner(3))
    pool.check_integrity()


def test_what_is_referred_to_is_never_evicted() -> None:
    pool = BlockPool(4)
    block_ids = cached(pool, 1, chain_of([1, 2, 3, 4]))
    pool.acquire(chain_of([1, 2]), 1, owner(2))
    pool.free(block_ids, owner(1))
    assert set(pool.allocate(3, owner(3))) == {2, 3, block_ids[1]}
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1, owner(3))
    assert pool.acquire(chain_of([1, 2]), 1, owner(4)) == block_ids[:1]
    pool.check_integrity()


def test_the_least_recently_used_goes_first_and_a_child_before_its_parent() -> None:
    pool = BlockPool(6)
    old, young = chain_of([1, 2, 3, 4, 5, 6]), chain_of([7, 7, 8, 8, 9, 9])
    for number, chain in enumerate((old, young)):
        pool.free(cached(pool, number, chain), owner(number))
    pool.free(pool.acquire(old, 1, owner(3)), owner(3))  # its first block is the youngest now
    left: list[tuple[int, int]] = []
    for _ in range(6):
        pool.allocate(1, owner(4))
        left.append((pool.num_cached(old, 3), pool.num_cached(young, 3)))
        pool.check_integrity()
    assert left == [(2, 3), (1, 3), (1, 2), (1, 1), (1, 0), (0, 0)]


def test_a_key_that_is_taken_leaves_the_block_and_all_behind_it_with_their_owner() -> None:
    pool = BlockPool(8)
    first = cached(pool, 1, chain_of([1, 2]))
    chain = chain_of([1, 2, 3, 4])
    block_ids = pool.allocate(2, owner(2))
    assert pool.publish(chain, block_ids, 0, 2, owner(2)) == 0
    assert pool.num_cached(chain, 2) == 1
    pool.free(block_ids, owner(2))
    assert (pool.num_empty_blocks, pool.num_cached_blocks) == (7, 0)
    pool.free(first, owner(1))
    pool.check_integrity()


def test_only_an_owner_publishes_and_only_behind_what_it_holds() -> None:
    pool = BlockPool(8)
    chain = chain_of([1, 2, 3, 4])
    block_ids = pool.allocate(2, owner(1))
    with pytest.raises(RuntimeError, match="belongs to"):
        pool.publish(chain, block_ids, 0, 2, owner(2))
    with pytest.raises(RuntimeError, match="belongs to"):
        pool.publish(chain, [7, block_ids[1]], 1, 2, owner(1))
    assert pool.num_cached(chain, 2) == 0


@pytest.mark.parametrize("root", [b"root", b"other root"])
def test_a_digest_that_tells_nothing_apart_never_gives_a_wrong_block(root: bytes) -> None:
    """F01: the first entry is found by its very tokens after its very parent, and nothing else is."""
    pool = BlockPool(8)
    first = pool.allocate(2, owner(1))
    assert pool.publish(chain_of([1, 2, 1, 2], digest=constant), first, 0, 2, owner(1)) == 1
    assert pool.num_cached(chain_of([1, 2, 1, 2], digest=constant), 2) == 1
    assert pool.num_cached(chain_of([1, 2], root, constant), 1) == (root == b"root")
    assert pool.num_cached(chain_of([2, 1], digest=constant), 1) == 0
    pool.check_integrity()


def test_hand_over_and_free_work_on_shared_blocks() -> None:
    pool = BlockPool(4)
    block_ids = [*cached(pool, 1, chain_of([1, 2])), *pool.allocate(1, owner(1))]
    outbound = Owner(OwnerKind.OUTBOUND, SequenceId(1, 1))
    pool.hand_over(block_ids, owner(1), outbound)
    with pytest.raises(RuntimeError, match="the prefix index, for"):
        pool.free(block_ids, owner(1))
    pool.free(block_ids, outbound)
    with pytest.raises(RuntimeError, match="the prefix index, for"):
        pool.free(block_ids[:1], outbound)
    assert (pool.num_empty_blocks, pool.num_cached_blocks) == (3, 1)
    pool.check_integrity()


def test_pins_are_claimed_once_or_given_up_once() -> None:
    pool = BlockPool(4)
    chain = chain_of([1, 2, 3, 4])
    block_ids = cached(pool, 1, chain)
    pool.free(block_ids, owner(1))
    for sequence in (2, 3):
        assert pool.pin(chain, 2, SequenceId(1, sequence)) == 2
    assert pool.num_free_blocks == 2
    assert pool.claim(owner(2)) == block_ids
    assert pool.claim(owner(2)) == []
    pool.unpin(SequenceId(1, 2))  # nothing is pinned for it any more
    pool.unpin(SequenceId(1, 3))
    pool.unpin(SequenceId(1, 3))
    assert pool.num_free_blocks == 2
    pool.free(block_ids, owner(2))
    assert pool.num_free_blocks == 4
    pool.check_integrity()


def test_retracted_blocks_and_what_follows_them_leave_the_index_and_stay_with_those_who_have_them() -> None:
    pool = BlockPool(8)
    chain, longer = chain_of([1, 2, 3, 4]), chain_of([1, 2, 3, 4, 5, 6])
    block_ids = cached(pool, 1, longer)
    pool.free(block_ids, owner(1))
    pool.acquire(chain, 1, owner(2))
    assert pool.acquire(chain, 2, owner(3)) == block_ids[:2]
    pool.retract(block_ids[:2], owner(3))
    assert (pool.num_cached(longer, 3), pool.num_empty_blocks, pool.num_free_blocks) == (0, 6, 6)
    pool.check_integrity()
    again = cached(pool, 4, chain)  # computed anew, and found instead
    assert set(again).isdisjoint(block_ids[:2])
    assert pool.acquire(chain, 2, owner(5)) == again
    pool.free(block_ids[:2], owner(3))
    assert pool.num_empty_blocks == 5
    pool.retract(block_ids[:1], owner(2))  # not cached any more: nothing happens to the new ones
    pool.free(block_ids[:1], owner(2))
    assert (pool.num_cached(chain, 2), pool.num_empty_blocks) == (2, 6)
    pool.check_integrity()


def test_behind_a_retracted_block_nothing_is_entered() -> None:
    pool = BlockPool(8)
    longer = chain_of([1, 2, 3, 4])
    block_ids = cached(pool, 1, chain_of([1, 2]))
    assert pool.acquire(longer, 1, owner(2)) == block_ids
    pool.retract(block_ids, owner(1))
    more = [*block_ids, *pool.allocate(1, owner(2))]
    assert pool.publish(longer, more, 1, 2, owner(2)) == 1
    assert pool.publish(longer, more, 0, 2, owner(2)) == 0
    pool.free(more, owner(2))
    pool.free(block_ids, owner(1))
    assert pool.num_empty_blocks == 8
    pool.check_integrity()


def test_blocks_that_are_cached_for_other_tokens_are_told_from_those_that_are_not_cached() -> None:
    pool = BlockPool(8)
    chain = chain_of([1, 2, 3, 4])
    block_ids = [*cached(pool, 1, chain), *pool.allocate(1, owner(1))]
    assert pool.num_shared(chain, block_ids) == 2
    assert pool.num_shared(chain_of([1, 2, 3, 4, 5, 6]), block_ids) == 2
    assert pool.num_shared(chain_of([2, 1, 3, 4]), block_ids) is None
    assert pool.num_shared(chain_of([1, 2]), block_ids) is None
    assert pool.publish(chain_of([2, 1]), block_ids, 0, 1, owner(1)) == 0
    pool.check_integrity()


def test_check_integrity_notices_a_wrong_count_and_a_wrong_order() -> None:
    pool = BlockPool(4)
    block_ids = cached(pool, 1, chain_of([1, 2, 3, 4]))
    entry = pool._index._by_block[block_ids[0]]
    entry.num_references += 1
    with pytest.raises(RuntimeError, match="reference counts"):
        pool.check_integrity()
    entry.num_references -= 1
    pool.free(block_ids, owner(1))
    pool._index._unreferenced.move_to_end(block_ids[1])
    with pytest.raises(RuntimeError, match="would be evicted before"):
        pool.check_integrity()
