"""Which blocks hold the KV of which tokens: a tree of full blocks by key, and which of them nobody uses, oldest first.

Knows no owners: the pool counts for it. Invariant: whoever refers to a block refers to all blocks before it in its
sequence, and gives them up last block first. So a block nobody refers to has only such blocks below it, all of them
longer unused, and the oldest of all is a leaf.
"""

from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from pdserve.core.block_keys import BlockKey, KeyChain


@dataclass(slots=True, eq=False)
class _Entry:
    """`parent`: the entry of the block before it, or, of a first block, the root that its key begins from."""

    block_id: int
    key: BlockKey
    parent: "_Entry | bytes"
    num_references: int = 1
    children: set["_Entry"] = field(default_factory=set["_Entry"])

    def follows(self, parent: "_Entry | bytes", key: BlockKey) -> bool:
        """Whether this is the KV of those very tokens after that very parent: equal digests prove nothing."""
        return self.parent == parent and self.key == key


class PrefixIndex:
    """See the module. Every operation takes time in proportion to the blocks it names or returns."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, _Entry] = {}
        self._by_block: dict[int, _Entry] = {}
        self._unreferenced: OrderedDict[int, _Entry] = OrderedDict()

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    @property
    def num_unreferenced(self) -> int:
        return len(self._unreferenced)

    def find(self, chain: KeyChain, max_blocks: int) -> list[int]:
        """The longest run of blocks from the chain's beginning that is here. Takes no reference."""
        block_ids: list[int] = []
        parent: _Entry | bytes = chain.root
        for key in chain.keys[:max_blocks]:
            entry = self._by_digest.get(key.digest)
            if entry is None or not entry.follows(parent, key):
                break
            block_ids.append(entry.block_id)
            parent = entry
        return block_ids

    def insert(self, block_id: int, chain: KeyChain, position: int, parent_block: int | None) -> bool:
        """Enter the chain's block number `position`, behind `parent_block`; with one reference to it.

        False, and nothing is done, if its key is taken, or the parent is not here (any more).
        """
        key = chain.keys[position]
        parent = chain.root if parent_block is None else self._by_block.get(parent_block)
        if parent is None or key.digest in self._by_digest:
            return False
        entry = _Entry(block_id, key, parent)
        if isinstance(parent, _Entry):
            parent.children.add(entry)
        self._by_digest[key.digest] = self._by_block[block_id] = entry
        return True

    def count(self, chain: KeyChain, block_ids: Seq[int]) -> int:
        """How many of the first of these blocks are here as the chain's first ones."""
        parent: _Entry | bytes = chain.root
        for position, (block_id, key) in enumerate(zip(block_ids, chain.keys, strict=False)):
            entry = self._by_block.get(block_id)
            if entry is None or not entry.follows(parent, key):
                return position
            parent = entry
        return min(len(block_ids), len(chain.keys))

    def refer(self, block_id: int) -> None:
        """One reference more: the block stays."""
        entry = self._by_block[block_id]
        entry.num_references += 1
        self._unreferenced.pop(block_id, None)

    def give_up(self, block_id: int) -> None:
        """One reference less; after the last the block may be evicted."""
        entry = self._by_block[block_id]
        entry.num_references -= 1
        if not entry.num_references:
            self._unreferenced[block_id] = entry

    def evict(self) -> int:
        """Forget the block that has been without a reference for longest; its id.

        Raises:
            KeyError: every block has a reference.
        """
        block_id, entry = self._unreferenced.popitem(last=False)
        self._forget(entry)
        return block_id

    def remove(self, block_id: int) -> list[int]:
        """Forget a block, whoever refers to it, and all that follow it; their ids."""
        top = self._by_block[block_id]
        entries = [top]
        for entry in entries:
            entries += entry.children
        for entry in reversed(entries):
            self._unreferenced.pop(entry.block_id, None)
            self._forget(entry)
        return [entry.block_id for entry in entries]

    def check_integrity(self, num_references: Mapping[int, int]) -> None:
        """Prove that the counts are those given, for exactly these blocks, and that a child goes before its parent.

        Raises:
            RuntimeError: they are not, or it would not.
        """
        counts = {block_id: entry.num_references for block_id, entry in self._by_block.items()}
        if set(self._by_digest.values()) != set(self._by_block.values()):
            raise RuntimeError("what can be found is not what is here")
        if counts != num_references:
            raise RuntimeError(f"reference counts {counts}, references {dict(num_references)}")
        if set(self._unreferenced) != {block_id for block_id, count in counts.items() if not count}:
            raise RuntimeError("what has no reference is not what can be evicted")
        ages = {block_id: age for age, block_id in enumerate(self._unreferenced)}
        for block_id, age in ages.items():
            children = [child.block_id for child in self._by_block[block_id].children]
            if any(ages.get(child, len(ages)) > age for child in children):
                raise RuntimeError(f"block {block_id} would be evicted before one of {children}, which follow it")

    def _forget(self, entry: _Entry) -> None:
        del self._by_digest[entry.key.digest], self._by_block[entry.block_id]
        if isinstance(entry.parent, _Entry):
            entry.parent.children.remove(entry)
