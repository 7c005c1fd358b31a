"""Which KV blocks are free and who owns each of the others. Knows neither their bytes nor reservations."""

from collections import Counter, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum

from pdserve.core.ids import SequenceId


class OwnerKind(Enum):
    """A block belongs to the free list, or to exactly one of these."""

    SEQUENCE = "sequence"
    INBOUND = "inbound"
    OUTBOUND = "outbound"


@dataclass(frozen=True, slots=True)
class Owner:
    kind: OwnerKind
    sequence_id: SequenceId


class BlockPool:
    """Hands out block ids 0 … num_blocks − 1. Engine thread only.

    Every change names the owner it expects, so that a double free or a stale hand-over is caught where it happens.
    Blocks are reused oldest-first, which keeps freed bytes cold for as long as possible.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free: deque[int] = deque(range(num_blocks))
        self._owners: list[Owner | None] = [None] * num_blocks

    @property
    def num_blocks(self) -> int:
        return len(self._owners)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free)

    def allocate(self, num_blocks: int, owner: Owner) -> list[int]:
        """Take free blocks.

        Raises:
            RuntimeError: too few are free; nothing was taken. Reservations exist to make this impossible.
        """
        if not self.can_allocate(num_blocks):
            raise RuntimeError(f"{num_blocks} blocks wanted for {owner}, {len(self._free)} free")
        block_ids = [self._free.popleft() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._owners[block_id] = owner
        return block_ids

    def hand_over(self, block_ids: Seq[int], old: Owner, new: Owner) -> None:
        """Change owner without passing through the free list."""
        self._check_owned(block_ids, old)
        for block_id in block_ids:
            self._owners[block_id] = new

    def free(self, block_ids: Seq[int], owner: Owner) -> None:
        self._check_owned(block_ids, owner)
        for block_id in block_ids:
            self._owners[block_id] = None
        self._free.extend(block_ids)

    def num_owned(self, kind: OwnerKind) -> int:
        return sum(owner is not None and owner.kind is kind for owner in self._owners)

    def check_integrity(self) -> None:
        """Prove that free list and owners partition the pool.

        Raises:
            RuntimeError: they do not.
        """
        counts = Counter(self._free)
        if any(count > 1 for count in counts.values()):
            raise RuntimeError("a block is twice in the free list")
        for block_id, owner in enumerate(self._owners):
            if (owner is None) != (block_id in counts):
                raise RuntimeError(f"block {block_id}: owner {owner}, in free list: {block_id in counts}")

    def _check_owned(self, block_ids: Seq[int], owner: Owner) -> None:
        if len(set(block_ids)) != len(block_ids):
            raise RuntimeError(f"a block is named twice for {owner}")
        for block_id in block_ids:
            if self._owners[block_id] != owner:
                raise RuntimeError(f"block {block_id} belongs to {self._owners[block_id]}, not to {owner}")
