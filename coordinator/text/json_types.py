"""JSON values by the names that clients know. Shows no value: it may be part of a prompt."""

from collections.abc import Mapping
from typing import cast

from pdserve.core.errors import invalid

_NAMES = {"bool": "boolean", "int": "number", "float": "number", "str": "string", "list": "list", "NoneType": "null"}


def json_type(value: object) -> str:
    """As the client would call it."""
    return _NAMES.get(type(value).__name__, "object")


def json_object(value: object, param: str) -> Mapping[str, object]:
    """Raises PdserveError (INVALID_ARGUMENT) naming `param` if `value` is no object."""
    if not isinstance(value, Mapping):
        raise invalid(f"{param} must be an object; it is a {json_type(value)}", param)
    return cast("Mapping[str, object]", value)


def json_list(value: object, max_items: int, param: str) -> list[object]:
    """A list of at most `max_items`; null is an empty one. Raises PdserveError (INVALID_ARGUMENT) naming `param`."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid(f"{param} must be a list; it is a {json_type(value)}", param)
    items = cast("list[object]", value)
    if len(items) > max_items:
        raise invalid(f"{param} may hold at most {max_items} entries; it holds {len(items)}", param)
    return items
