"""What workers and coordinators say of a model and of the shape of its KV cache, so that they can be compared."""

from dataclasses import dataclass, fields

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One loaded model. `name` is what clients ask for; `fingerprint` tells whether two workers may share KV."""

    name: str
    fingerprint: str
    architecture: str
    dtype: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    evaluation_id: str = ""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The meaning of a block's bytes. Two workers exchange blocks only if every field is equal.

    A block is one contiguous run: for each layer, K then V, each [kv_head, …] in `inner_order`:
    "slot_dim" is [block_size, head_dim] for both; "word_columns", with w elements to four bytes, [head_dim / w,
    block_size, w] for K and [block_size / w, head_dim, w] for V.
    """

    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    scale_layout: str = "none"
    head_shard_rank: int = 0
    head_shard_size: int = 1
    inner_order: str = "slot_dim"

    @property
    def block_bytes(self) -> int:
        heads = self.num_kv_heads // self.head_shard_size
        return self.num_layers * 2 * heads * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    def differences(self, other: "KvLayout") -> list[str]:
        """The names of the fields that differ, each with both values: 'dtype (bfloat16, float32)'."""
        return [
            f"{f.name} ({getattr(self, f.name)}, {getattr(other, f.name)})"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]
