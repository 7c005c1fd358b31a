"""Which KV blocks are free, who owns each of the others, and which are shared. Knows neither bytes nor reservations.

free ──allocate──► owned ──publish──► in the prefix index ──evicted by allocate──► owned
  ▲                  │                   references: 0 or more
  │◄──────free───────┘                      │ retract
  │◄──────last free─────── shared still ◄───┘
"""

from collections import Counter, deque
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum

from pdserve.core.block_keys import KeyChain
from pdserve.core.ids import SequenceId
from pdserve.engine.prefix_index import PrefixIndex


class OwnerKind(Enum):
    """Who owns a block, or refers to a block of the prefix index. RESERVATION only refers."""

    SEQUENCE = "sequence"
    INBOUND = "inbound"
    OUTBOUND = "outbound"
    RESERVATION = "reservation"


@dataclass(frozen=True, slots=True)
class Owner:
    kind: OwnerKind
    sequence_id: SequenceId


class OutOfBlocksError(RuntimeError):
    """Too few blocks are free. Reservations exist to make this impossible."""


class BlockPool:
    """Hands out block ids 0 … num_blocks − 1.

    Every change names the owner it expects, so that a double free or a stale hand-over is caught where it happens.
    Blocks are reused oldest-first, which keeps freed bytes cold for as long as possible; what is cached goes only when
    nothing else is free, and never while anybody refers to it.

    `lock` guards every call, for no longer than it takes to walk the blocks that it names. Whoever owns a block calls
    from one thread; `allocate`, `pin`, `unpin` and the counts may come from any.
    """

    def __init__(self, num_blocks: int, lock: AbstractContextManager[object] | None = None) -> None:
        self._lock = lock or nullcontext()
        self._free: deque[int] = deque(range(num_blocks))
        self._owners: list[Owner | None] = [None] * num_blocks
        self._index = PrefixIndex()
        self._references: dict[int, set[Owner]] = {}
        self._pins: dict[SequenceId, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._owners)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated: empty ones, and cached ones that nobody refers to."""
        with self._lock:
            return self._num_free()

    @property
    def num_empty_blocks(self) -> int:
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the prefix index that nobody refers to."""
        return self._index.num_unreferenced

    # --- ownership ----------------------------------------------------------------------------------------------------

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_free_blocks

    def allocate(self, num_blocks: int, owner: Owner) -> list[int]:
        """Take free blocks, and cached ones, longest unused first, once those are gone.

        Raises:
            OutOfBlocksError: too few are free; nothing was taken.
        """
        with self._lock:
            if num_blocks > self._num_free():
                raise OutOfBlocksError(f"{num_blocks} blocks wanted for {owner}, {self._num_free()} free")
            block_ids = [self._free.popleft() if self._free else self._evict() for _ in range(num_blocks)]
            for block_id in block_ids:
                self._owners[block_id] = owner
            return block_ids

    def hand_over(self, block_ids: Seq[int], old: Owner, new: Owner) -> None:
        """Change owner, of shared blocks too, without passing through the free list."""
        with self._lock:
            self._hand_over(block_ids, old, new)

    def free(self, block_ids: Seq[int], owner: Owner) -> None:
        """Give up blocks, in the order of their sequence: own ones are free, shared ones stay cached."""
        with self._lock:
            self._give_up(block_ids, owner)

    def num_owned(self, kind: OwnerKind) -> int:
        return sum(owner is not None and owner.kind is kind for owner in self._owners)

    # --- the prefix index ---------------------------------------------------------------------------------------------

    def num_cached(self, chain: KeyChain, max_blocks: int) -> int:
        """How many blocks `acquire` would find now."""
        with self._lock:
            return len(self._index.find(chain, max_blocks))

    def acquire(self, chain: KeyChain, max_blocks: int, owner: Owner) -> list[int]:
        """The longest cached run of a sequence's first blocks, at most `max_blocks`; they stay until given up."""
        with self._lock:
            return self._acquire(chain, max_blocks, owner)

    def publish(self, chain: KeyChain, block_ids: Seq[int], num_shared: int, num_full: int, owner: Owner) -> int:
        """Enter a sequence's blocks from number `num_shared`, where those before end, up to `num_full`; how many are
        shared now. The blocks must be full and truly computed, or received and verified.

        A block whose key is taken stays the owner's own, and so do all behind it: whoever holds a shared block holds
        all blocks before it, or those could be evicted first. Nothing is entered behind a block that was retracted.
        """
        with self._lock:
            self._check_owned(block_ids[max(0, num_shared - 1) : num_full], owner)
            for position in range(num_shared, num_full):
                block_id = block_ids[position]
                parent = block_ids[position - 1] if position else None
                if block_id in self._references or not self._index.insert(block_id, chain, position, parent):
                    return position
                self._owners[block_id] = None
                self._references[block_id] = {owner}
            return num_full

    def num_shared(self, chain: KeyChain, block_ids: Seq[int]) -> int | None:
        """How many of a sequence's first blocks are in the index as the chain's; None if any is there as another's."""
        with self._lock:
            num_shared = self._index.count(chain, block_ids)
            foreign = any(block_id in self._index for block_id in block_ids[num_shared:])
            return None if foreign else num_shared

    def retract(self, block_ids: Seq[int], owner: Owner) -> None:
        """The content of a sequence's blocks is not to be trusted: they and all cached behind them leave the index at
        once, so that nobody else begins from them. Who has them keeps them, the owner too."""
        with self._lock:
            self._check_owned(block_ids, owner)
            first = next((block_id for block_id in block_ids if block_id in self._index), None)
            for block_id in self._index.remove(first) if first is not None else []:
                if not self._references[block_id]:
                    del self._references[block_id]
                    self._free.append(block_id)

    # --- pins: what is held for a reservation, from the answer to Reserve on ------------------------------------------

    def pin(self, chain: KeyChain, max_blocks: int, sequence_id: SequenceId) -> int:
        """As `acquire`, for a sequence that is still to come; the number of blocks."""
        with self._lock:
            pinned = self._acquire(chain, max_blocks, Owner(OwnerKind.RESERVATION, sequence_id))
            if pinned:
                self._pins[sequence_id] = pinned
            return len(pinned)

    def num_pinned(self, sequence_id: SequenceId) -> int:
        """Blocks that `claim` would give."""
        with self._lock:
            return len(self._pins.get(sequence_id, ()))

    def claim(self, owner: Owner) -> list[int]:
        """The blocks pinned for the owner's sequence, now held by `owner`."""
        with self._lock:
            pinned = self._pins.pop(owner.sequence_id, [])
            self._hand_over(pinned, Owner(OwnerKind.RESERVATION, owner.sequence_id), owner)
            return pinned

    def unpin(self, sequence_id: SequenceId) -> None:
        """Give up what is still pinned for a sequence, if anything is."""
        with self._lock:
            self._unpin(sequence_id)

    # --- proof --------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Prove that free list, owners and prefix index partition the pool, and that references are those counted.

        Raises:
            RuntimeError: they do not, or are not.
        """
        with self._lock:
            places = Counter(self._free)
            places.update(block_id for block_id, owner in enumerate(self._owners) if owner is not None)
            places.update(self._references.keys())
            wrong = {block_id: places[block_id] for block_id in range(self.num_blocks) if places[block_id] != 1}
            if wrong:
                raise RuntimeError(f"blocks that are not in exactly one place, with how many: {wrong}")
            holders = {block_id: len(owners) for block_id, owners in self._references.items()}
            self._index.check_integrity(
                {block_id: count for block_id, count in holders.items() if block_id in self._index}
            )
            if lost := [block_id for block_id, count in holders.items() if not count and block_id not in self._index]:
                raise RuntimeError(f"blocks that nobody has, and that are neither free nor cached: {lost}")
            for sequence_id, pinned in self._pins.items():
                self._check_owned(pinned, Owner(OwnerKind.RESERVATION, sequence_id))

    # --- under the lock -----------------------------------------------------------------------------------------------

    def _num_free(self) -> int:
        return len(self._free) + self._index.num_unreferenced

    def _evict(self) -> int:
        block_id = self._index.evict()
        del self._references[block_id]
        return block_id

    def _acquire(self, chain: KeyChain, max_blocks: int, owner: Owner) -> list[int]:
        block_ids = self._index.find(chain, max_blocks)
        for block_id in block_ids:
            self._refer(block_id, owner)
            self._index.refer(block_id)
        return block_ids

    def _refer(self, block_id: int, owner: Owner) -> None:
        owners = self._references[block_id]
        if owner in owners:
            raise RuntimeError(f"{owner} refers to block {block_id} already")
        owners.add(owner)

    def _hand_over(self, block_ids: Seq[int], old: Owner, new: Owner) -> None:
        self._check_owned(block_ids, old)
        for block_id in block_ids:
            if block_id in self._references:
                self._refer(block_id, new)
                self._references[block_id].remove(old)
            else:
                self._owners[block_id] = new

    def _give_up(self, block_ids: Seq[int], owner: Owner) -> None:
        self._check_owned(block_ids, owner)
        for block_id in reversed(block_ids):  # a child before its parent
            if block_id in self._index:
                self._references[block_id].remove(owner)
                self._index.give_up(block_id)
        self._free.extend([b for b in block_ids if b not in self._index and self._leave(b, owner)])

    def _leave(self, block_id: int, owner: Owner) -> bool:
        """One owner less of a block that is not cached; whether that was the last."""
        holders = self._references.get(block_id)
        if holders is None:
            self._owners[block_id] = None
            return True
        holders.remove(owner)
        if not holders:
            del self._references[block_id]
        return not holders

    def _unpin(self, sequence_id: SequenceId) -> None:
        self._give_up(self._pins.pop(sequence_id, []), Owner(OwnerKind.RESERVATION, sequence_id))

    def _check_owned(self, block_ids: Seq[int], owner: Owner) -> None:
        if len(set(block_ids)) != len(block_ids):
            raise RuntimeError(f"a block is named twice for {owner}")
        for block_id in block_ids:
            if self._owners[block_id] != owner and owner not in self._references.get(block_id, ()):
                raise RuntimeError(f"block {block_id} belongs to {self._owner(block_id)}, not to {owner}")

    def _owner(self, block_id: int) -> str:
        holders = self._references.get(block_id)
        return str(self._owners[block_id]) if holders is None else f"the prefix index, for {holders}"
