"""One sequence's part in the prefix cache: what it takes from it when it begins, what it gives to it as it grows."""

from dataclasses import dataclass

from pdserve.core.block_keys import KeyChain
from pdserve.engine.block_pool import BlockPool, Owner
from pdserve.engine.sequence import Sequence


@dataclass(slots=True)
class CachedPrefix:
    """Engine thread only. The sequence's first `num_shared` blocks are in the prefix index."""

    pool: BlockPool
    chain: KeyChain
    num_shared: int = 0
    _at_its_end: bool = False

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """How many of its tokens `acquire` would find now."""
        return self.pool.num_cached(self.chain, self._limit(sequence)) * self.chain.block_size

    def acquire(self, sequence: Sequence, owner: Owner) -> int:
        """Begin the sequence with what is cached of it; the number of tokens, always less than it has.

        At least the last one is left to compute: its row is what the next token is sampled from.
        """
        sequence.block_ids = self.pool.acquire(self.chain, self._limit(sequence), owner)
        self.num_shared = len(sequence.block_ids)
        sequence.num_computed_tokens = self.num_shared * self.chain.block_size
        return sequence.num_computed_tokens

    def adopt(self, sequence: Sequence) -> bool:
        """Go on from blocks that the sequence has. False: some of them are cached as the KV of other tokens."""
        self.chain.extend(sequence.token_ids, sequence.num_computed_tokens // self.chain.block_size)
        num_shared = self.pool.num_shared(self.chain, sequence.block_ids)
        self.num_shared = num_shared or 0
        return num_shared is not None

    def publish(self, sequence: Sequence, owner: Owner) -> None:
        """Give to the cache what is full and computed; call when that is certain. Nothing new costs nothing."""
        num_full = sequence.num_computed_tokens // self.chain.block_size
        if self._at_its_end or num_full <= self.num_shared:
            return
        self.chain.extend(sequence.token_ids, num_full)
        self.num_shared = self.pool.publish(self.chain, sequence.block_ids, self.num_shared, num_full, owner)
        self._at_its_end = self.num_shared < num_full

    def retract(self, sequence: Sequence, owner: Owner) -> None:
        """Take back what was given and what was taken: the sequence's KV is not to be trusted."""
        self.pool.retract(sequence.block_ids, owner)
        self._at_its_end = True

    def _limit(self, sequence: Sequence) -> int:
        num_blocks = (sequence.num_tokens - 1) // self.chain.block_size
        self.chain.extend(sequence.token_ids, num_blocks)
        return num_blocks
