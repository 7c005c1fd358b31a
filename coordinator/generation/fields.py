"""Checks of single request fields: type, finiteness, range. Knows no field by name."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from pdserve.core.errors import invalid

NO_LIMIT = 2**31 - 1
"""Upper bounds from here on only protect number formats, and help nobody in a message."""


MAX_IDS = 1024
"""Of `stop_token_ids`, and of `logit_bias`: each is gone through for every token."""


@dataclass(frozen=True, slots=True)
class Range:
    """Allowed numbers. `low_open`: `low` itself is not allowed."""

    low: float
    high: float
    low_open: bool = False

    def __contains__(self, value: float) -> bool:
        """False for NaN."""
        above = value > self.low if self.low_open else value >= self.low
        return above and value <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.low_open else '['}{self.low:g}, {self.high:g}]"


def number(value: object, allowed: Range, param: str) -> float | None:
    """A finite number in range, or None for null.

    Raises:
        PdserveError: INVALID_ARGUMENT naming `param`: another type (booleans and strings are no numbers), NaN,
            infinite, or out of range.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(f"{param} must be a number in {allowed}", param)
    if isinstance(value, float) and not math.isfinite(value):
        raise invalid(f"{param} must be a finite number in {allowed}", param)
    if value not in allowed:
        raise invalid(f"{param} must be in {allowed}; it is {_shown(value)}", param)
    return float(value)


def integer(value: object, low: int, high: int, param: str) -> int | None:
    """An integer from `low` to `high`, both allowed, or None for null.

    Raises:
        PdserveError: INVALID_ARGUMENT naming `param`.
    """
    if value is None:
        return None
    allowed = f"at least {low}" if high >= NO_LIMIT else f"from {low} to {high}"
    if type(value) is not int:
        raise invalid(f"{param} must be an integer, {allowed}", param)
    if value > high >= NO_LIMIT:
        raise invalid(f"{param} must be at most {high}; it is {_shown(value)}", param)
    if not low <= value <= high:
        raise invalid(f"{param} must be {allowed}; it is {_shown(value)}", param)
    return value


def boolean(value: object, param: str) -> bool:
    """True or False; null is False."""
    if value is None or isinstance(value, bool):
        return bool(value)
    raise invalid(f"{param} must be true or false", param)


def strings(value: object, max_items: int, max_chars: int, param: str) -> tuple[str, ...]:
    """One non-empty string or a list of them; null is none.

    Raises:
        PdserveError: INVALID_ARGUMENT naming `param`.
    """
    items: Sequence[object] = _listed(value)
    if len(items) > max_items:
        raise invalid(f"{param} may hold at most {max_items} strings; it holds {len(items)}", param)
    for item in items:
        if not isinstance(item, str) or not 1 <= len(item) <= max_chars:
            raise invalid(f"{param} must be text, or a list of texts, of 1 to {max_chars} characters each", param)
    return tuple(cast("Sequence[str]", items))


def token_ids(value: object, vocab_size: int, param: str) -> frozenset[int]:
    """A list of at most `MAX_IDS` ids in [0, `vocab_size`); null is none."""
    if value is None:
        return frozenset()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise invalid(f"{param} must be a list of token ids", param)
    items = cast("Sequence[object]", value)
    _check_count(len(items), param)
    return frozenset(_token_id(item, vocab_size, param) for item in items)


def logit_bias(value: object, vocab_size: int, allowed: Range, param: str) -> dict[int, float]:
    """A map from at most `MAX_IDS` token ids (in JSON: their digits) to biases; null is none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise invalid(f"{param} must be an object from token ids to numbers", param)
    entries = cast("Mapping[object, object]", value)
    _check_count(len(entries), param)
    biases: dict[int, float] = {}
    for key, bias in entries.items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        token_id = _token_id(int(cast("str", key)) if digits else key, vocab_size, param)
        biases[token_id] = number(bias, allowed, f"{param}[{token_id}]") or 0.0
    return biases


def _check_count(count: int, param: str) -> None:
    if count > MAX_IDS:
        raise invalid(f"{param} may hold at most {MAX_IDS} token ids; it holds {count}", param)


def _listed(value: object) -> Sequence[object]:
    if value is None:
        return ()
    if not isinstance(value, str) and isinstance(value, Sequence):
        return cast("Sequence[object]", value)
    return (value,)


def _token_id(value: object, vocab_size: int, param: str) -> int:
    if type(value) is not int or not 0 <= value < vocab_size:
        raise invalid(f"{param} must hold token ids from 0 to {vocab_size - 1} only", param)
    return value


def _shown(value: float) -> str:
    """Short even for an integer of a thousand digits."""
    return str(value) if abs(value) < 2**70 else "out of all bounds"
