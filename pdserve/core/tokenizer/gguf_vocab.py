"""The vocabulary in a GGUF file's metadata, checked. Knows nothing of how text is split into its tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

from pdserve.core.model_files.config import bad_model

_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """The values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GgufVocab:
    """`tokens` and `types` are indexed by token id; `metadata` is the whole file's."""

    tokens: list[str]
    types: list[int]
    metadata: Mapping[str, object]

    def value(self, name: str, default: object = None) -> object:
        """The value of the key tokenizer.ggml.`name`."""
        return self.metadata.get(_PREFIX + name, default)

    def flag(self, name: str, default: bool) -> bool:
        return self.value(name, default) is True

    def token_id(self, name: str) -> int | None:
        """The id under a key that should name one; None if it names no token."""
        token_id = self.value(name)
        return token_id if isinstance(token_id, int) and 0 <= token_id < len(self.tokens) else None

    def strings(self, name: str) -> list[str]:
        """
        Raises:
            PdserveError: INVALID_ARGUMENT, if the key is missing or holds something else.
        """
        return _string_list(self.metadata, _PREFIX + name)

    def floats(self, name: str) -> list[float]:
        """One number for each token.

        Raises:
            PdserveError: INVALID_ARGUMENT, if the key is missing or holds something else.
        """
        return [float(cast("float", x)) for x in self._per_token(name, (int, float))]

    def _per_token(self, name: str, kinds: tuple[type, ...]) -> list[object]:
        return _list_for_tokens(self.metadata, name, kinds, len(self.tokens))


def read_gguf_vocab(metadata: Mapping[str, object]) -> GgufVocab:
    """
    Raises:
        PdserveError: INVALID_ARGUMENT, naming the key that is missing or malformed.
    """
    tokens = _string_list(metadata, _PREFIX + "tokens")
    if _PREFIX + "token_type" not in metadata:
        return GgufVocab(tokens, [TokenType.NORMAL] * len(tokens), metadata)
    types = _list_for_tokens(metadata, "token_type", (int,), len(tokens))
    return GgufVocab(tokens, cast("list[int]", types), metadata)


def _list_for_tokens(
    metadata: Mapping[str, object], name: str, kinds: tuple[type, ...], num_tokens: int
) -> list[object]:
    value = metadata.get(_PREFIX + name)
    items = cast("list[object]", value) if isinstance(value, list) else []
    if len(items) != num_tokens or not all(isinstance(item, kinds) for item in items):
        raise bad_model(f"{_PREFIX}{name} is not a list of numbers as long as {_PREFIX}tokens")
    return items


def _string_list(metadata: Mapping[str, object], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in cast("list[object]", value)):
        raise bad_model(f"{key} is missing or not a list of strings")
    return cast("list[str]", value)
