"""Typed reads of a config's raw values: a wrong type or size is a failure that names its key. Knows no model."""

from collections.abc import Iterable, Mapping
from typing import cast

from pdserve.core.model_files.config import bad_model

Raw = Mapping[str, object]

_INT_LIMIT = 1 << 31
_FLOAT_LIMIT = 1e300
_MAX_LAYERS = 10_000


def require_int(raw: Raw, key: str) -> int:
    """`raw[key]` as an int of 32 bits.

    Raises:
        PdserveError: it is missing or something else.
    """
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_model(f"the model's config has no integer {key!r} (found {_shown(value)})")
    if not -_INT_LIMIT <= value < _INT_LIMIT:
        raise bad_model(f"{key!r} in the model's config is out of range ({_shown(value)})")
    return value


def get_int(raw: Raw, key: str, default: int) -> int:
    """As `require_int`, with a default for a key that is missing or null."""
    return default if raw.get(key) is None else require_int(raw, key)


def require_count(raw: Raw, key: str) -> int:
    """As `require_int`, of something there must be at least one of."""
    value = require_int(raw, key)
    if value < 1:
        raise bad_model(f"{key!r} in the model's config is {value}; it must be at least 1")
    return value


def require_num_layers(raw: Raw, key: str) -> int:
    """As `require_count`; bounded, because configs are built layer by layer."""
    value = require_count(raw, key)
    if value > _MAX_LAYERS:
        raise bad_model(f"{key!r} in the model's config is {value}; at most {_MAX_LAYERS} make sense")
    return value


def require_float(raw: Raw, key: str) -> float:
    """`raw[key]` as a finite float.

    Raises:
        PdserveError: it is missing or something else.
    """
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_model(f"the model's config has no number {key!r} (found {_shown(value)})")
    if not abs(value) < _FLOAT_LIMIT:
        raise bad_model(f"{key!r} in the model's config is out of range ({_shown(value)})")
    return float(value)


def get_float(raw: Raw, key: str, default: float) -> float:
    """As `require_float`, with a default for a key that is missing or null."""
    return default if raw.get(key) is None else require_float(raw, key)


def get_bool(raw: Raw, key: str, default: bool) -> bool:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise bad_model(f"{key!r} in the model's config is neither true nor false (found {_shown(value)})")
    return value


def section(raw: Raw, key: str) -> dict[str, object]:
    """The object at `key`; empty if missing or null."""
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_model(f"{key!r} in the model's config is not an object (found {_shown(value)})")
    return cast("dict[str, object]", value)


def as_token_ids(value: object, where: str) -> list[int]:
    """An int or a list of ints (or null: none) as configs give token ids."""
    if value is None:
        return []
    items: list[object] = list(cast("list[object]", value)) if isinstance(value, list) else [value]
    ids = [item for item in items if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < _INT_LIMIT]
    if len(ids) != len(items):
        raise bad_model(f"{where} holds something other than token ids")
    return ids


def unique_sorted(token_ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(token_ids)))


def _shown(value: object) -> str:
    """`repr`, short enough for a message; huge ints, which refuse to be printed, by their size."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
