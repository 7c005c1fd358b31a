"""Keys of KV blocks: equal keys mean equal bytes, in every process and after every restart. Holds no blocks.

The root names everything but tokens that a block's content depends on. A sequence's first key is the digest of the
root's digest and the first block's token ids; each later one that of the key before it and its own block's ids.
"""

import struct
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields

import xxhash

from pdserve.core.model_info import KvLayout

Digest = Callable[[bytes], bytes]


def xxh3_128(data: bytes) -> bytes:
    """16 bytes. Not secure against forgery: whoever finds a key compares what it stands for, too."""
    return xxhash.xxh3_128_digest(data)


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """What a request says of its KV: only requests of one group share blocks."""

    adapter: str = ""
    cache_salt: str = ""


COMMON_GROUP = PrefixGroup()
"""Of requests with neither adapter nor salt."""


@dataclass(frozen=True, slots=True)
class PrefixScope:
    """What a worker says of its KV. `model_fingerprint` covers weights and config, and so how positions are encoded."""

    model_fingerprint: str
    kv_layout: KvLayout
    kernel_numerics: str
    digest: Digest = xxh3_128

    def root(self, group: PrefixGroup) -> bytes:
        """Every field's name and value, each led by its length: no two different scopes or groups look alike."""
        layout = {f"kv_layout.{f.name}": str(getattr(self.kv_layout, f.name)) for f in fields(self.kv_layout)}
        named = {
            "model_fingerprint": self.model_fingerprint,
            "kernel_numerics": self.kernel_numerics,
            **layout,
            "adapter": group.adapter,
            "cache_salt": group.cache_salt,
        }
        return b"".join(_with_length(text) for item in named.items() for text in item)

    def key_chain(self, group: PrefixGroup) -> "KeyChain":
        """The keys of a sequence of this group; none yet."""
        return KeyChain(self.root(group), self.kv_layout.block_size, self.digest)


@dataclass(frozen=True, slots=True)
class BlockKey:
    """A full block's key, and its token ids as u32 little-endian."""

    digest: bytes
    token_bytes: bytes


class KeyChain:
    """The keys of one sequence's full blocks, made as the sequence grows."""

    def __init__(self, root: bytes, block_size: int, digest: Digest = xxh3_128) -> None:
        self.root = root
        self.block_size = block_size
        self.keys: list[BlockKey] = []
        self._digest = digest
        self._last = digest(root)

    def extend(self, token_ids: Seq[int], num_blocks: int) -> None:
        """Have keys for at least the first `num_blocks` blocks of the sequence, whose ids these are from its first on.

        Raises:
            ValueError: the blocks are not all full.
        """
        begin, end = len(self.keys) * self.block_size, num_blocks * self.block_size
        if end > len(token_ids):
            raise ValueError(f"{num_blocks} blocks of {self.block_size} tokens in {len(token_ids)}")
        if begin >= end:
            return
        packed = struct.pack(f"<{end - begin}I", *token_ids[begin:end])
        for start in range(0, len(packed), 4 * self.block_size):
            token_bytes = packed[start : start + 4 * self.block_size]
            self._last = self._digest(self._last + token_bytes)
            self.keys.append(BlockKey(self._last, token_bytes))


def _with_length(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<I", len(encoded)) + encoded
