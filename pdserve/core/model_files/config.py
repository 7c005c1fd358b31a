"""The one description of a model that the engine computes from, whatever file format it came in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from pdserve.core.errors import ErrorReason, PdserveError


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. `architecture` is the Hugging Face class name; `stored_dtype` that of the file."""

    architecture: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    context_length: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    stored_dtype: str

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size"):
            if getattr(self, name) < 1:
                raise bad_model(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise bad_model(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise bad_model(f"head_dim is {self.head_dim}; rotary embeddings need an even number")
        if self.context_length < 1:
            raise bad_model(f"context_length is {self.context_length}; it must be at least 1")


def unsupported(feature: str) -> PdserveError:
    """A model feature that is not implemented, refused by name."""
    return PdserveError(ErrorReason.UNSUPPORTED, f"the model needs {feature}, which is not implemented")


def bad_model(message: str) -> PdserveError:
    """Model files that contradict themselves or are incomplete."""
    return PdserveError(ErrorReason.INVALID_ARGUMENT, message, param="model")


def require_int(raw: Mapping[str, object], key: str) -> int:
    """`raw[key]` as an int.

    Raises:
        PdserveError: it is missing or something else.
    """
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_model(f"the model's config has no integer {key!r} (found {value!r})")
    return value


def get_int(raw: Mapping[str, object], key: str, default: int) -> int:
    """As `require_int`, with a default for a key that is missing or null."""
    return default if raw.get(key) is None else require_int(raw, key)


def get_float(raw: Mapping[str, object], key: str, default: float) -> float:
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_model(f"the model's config has no number {key!r} (found {value!r})")
    return float(value)


def as_token_ids(value: object, where: str) -> list[int]:
    """An int or a list of ints (or null: none) as configs give token ids."""
    if value is None:
        return []
    items: list[object] = list(cast("list[object]", value)) if isinstance(value, list) else [value]
    ids = [item for item in items if isinstance(item, int) and not isinstance(item, bool) and item >= 0]
    if len(ids) != len(items):
        raise bad_model(f"{where} holds something other than token ids")
    return ids


def unique_sorted(token_ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(token_ids)))
