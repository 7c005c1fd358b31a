"""Prompts as token ids, of exact lengths: fresh ones, and ones that share prefixes as a trace has it. Knows no text."""

import hashlib
from collections.abc import Sequence

import numpy as np

BLOCK_SIZE = 16
"""Tokens in a KV block of most servers."""

MIN_VOCABULARY = 32


def derived_seed(seed: int, *names: str | int) -> int:
    """A seed of 128 bits for one purpose of a run: different for any other `seed` or `names`."""
    return int.from_bytes(hashlib.sha256(repr((int(seed), *names)).encode()).digest()[:16], "big")


def warm_up_seed(seed: int) -> int:
    """What to make a run's warm-up requests from: they share no block with those that are measured."""
    return derived_seed(seed, "warm-up")


class FreshPrompts:
    """Random ids: nothing that a server computed for one prompt is of use for another.

    A block of 16 ids, each one of at least 16 and usually tens of thousands, has k^16 ≥ 2^64 values (2^249 at SmolLM2's
    49,152 − 256), and generators are seeded with 128 bits derived from `seed`. By the birthday bound, two of n prompts,
    of one seed or of several, begin alike with a chance below n² / 2^65 in the smallest vocabulary, and n² / 2^129 in
    any of 512 ids or more: a million prompts, 2^-89. So a second run must have another seed, and then finds
    nothing in a cache; prompts shorter than a block are never found.

    Ids below `first_id`, among which most tokenizers have their special tokens, are left out; of a small vocabulary,
    those in its lower half.

    Raises:
        ValueError: a vocabulary below 32.
    """

    def __init__(self, seed: int, vocab_size: int, first_id: int = 256) -> None:
        if vocab_size < MIN_VOCABULARY:
            raise ValueError(f"random prompts need a vocabulary of {MIN_VOCABULARY} or more, not {vocab_size}")
        self._rng = np.random.default_rng(derived_seed(seed, "fresh"))
        self._low = min(first_id, vocab_size // 2)
        self._high = vocab_size

    def next(self, num_tokens: int) -> tuple[int, ...]:
        """Of `num_tokens` tokens, which must be at least 1."""
        _check_length(num_tokens)
        ids: list[int] = self._rng.integers(self._low, self._high, num_tokens).tolist()
        return tuple(ids)


class PrefixPrompts:
    """Prompts that begin with named blocks of `block_tokens` tokens: equal names at equal positions are equal tokens.

    What no name covers is fresh, as in `FreshPrompts`, and so is each name's block.

    Raises:
        ValueError: a vocabulary below 32, or blocks without tokens.
    """

    def __init__(self, seed: int, vocab_size: int, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ValueError(f"a block has at least one token, not {block_tokens}")
        self._seed = seed
        self._vocab_size = vocab_size
        self._block_tokens = block_tokens
        self._fresh = FreshPrompts(seed, vocab_size)

    def of(self, num_tokens: int, hash_ids: Sequence[int]) -> tuple[int, ...]:
        """Of exactly `num_tokens` tokens: names beyond them are left out, and the last one's block may be cut."""
        _check_length(num_tokens)
        num_named = -(-num_tokens // self._block_tokens)
        blocks = [self._block(position, name) for position, name in enumerate(hash_ids[:num_named])]
        named = [token_id for block in blocks for token_id in block][:num_tokens]
        num_fresh = num_tokens - len(named)
        return (*named, *self._fresh.next(num_fresh)) if num_fresh else tuple(named)

    def _block(self, position: int, name: int) -> tuple[int, ...]:
        seed = derived_seed(self._seed, "block", position, name)
        return FreshPrompts(seed, self._vocab_size).next(self._block_tokens)


def _check_length(num_tokens: int) -> None:
    if num_tokens < 1:
        raise ValueError(f"a prompt has at least one token, not {num_tokens}")


def intended_hit_rate(prompts: Sequence[tuple[int, ...]], block_size: int = BLOCK_SIZE) -> float:
    """Share of prompt tokens that an ideal cache finds: of whole blocks, without bound, empty at first.

    Each prompt is in it before the next one comes. At least the last token of a prompt is always computed.
    """
    blocks: dict[tuple[int, tuple[int, ...]], int] = {}
    num_found = sum(_insert(blocks, prompt, block_size) for prompt in prompts)
    num_tokens = sum(len(prompt) for prompt in prompts)
    return num_found / num_tokens if num_tokens else 0.0


def _insert(blocks: dict[tuple[int, tuple[int, ...]], int], prompt: tuple[int, ...], block_size: int) -> int:
    """Puts the prompt's whole blocks in, each under the one before it; the number of tokens that were there already."""
    parent = num_known = 0
    for begin in range(0, len(prompt) - block_size + 1, block_size):
        key = (parent, prompt[begin : begin + block_size])
        num_known += key in blocks
        parent = blocks.setdefault(key, len(blocks) + 1)
    return min(num_known, (len(prompt) - 1) // block_size) * block_size
