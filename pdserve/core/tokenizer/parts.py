"""What a tokenizer's parts are, as tokenizer.json would have it, and how long a text a token can stand for at most."""

import json
from typing import cast

from tokenizers import Tokenizer

_LENGTHS = {"Replace": 1, "Prepend": 1, "NFC": 4}
"""By normaliser, how many characters may become one: four in canonical compositions such as U+1F82."""


def described(part: object) -> dict[str, object]:
    """A part's description; its state is that JSON. Writing out the whole tokenizer for it would take a second."""
    if part is None:
        return {"type": "none"}
    return cast("dict[str, object]", json.loads(cast("bytes", part.__getstate__())))


def max_chars_per_token(tokenizer: Tokenizer) -> int:
    """No token stands for more characters of text than this; 0 if there is no such number."""
    swallows_spaces = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    if swallows_spaces:
        return 0
    return _chars_made_one(described(tokenizer.normalizer)) * max(map(len, tokenizer.get_vocab()), default=0)


def _chars_made_one(normalizer: dict[str, object]) -> int:
    """0 if there is no bound, or none is known."""
    kind = str(normalizer["type"])
    if kind == "none":
        return 1
    if kind == "Sequence":
        bound = 1
        for step in cast("list[dict[str, object]]", normalizer["normalizers"]):
            bound *= _chars_made_one(step)
        return bound
    if kind == "Replace" and not _replaces_a_char(normalizer):
        return 0
    return _LENGTHS.get(kind, 0)


def _replaces_a_char(replace: dict[str, object]) -> bool:
    pattern = cast("dict[str, str]", replace["pattern"]).get("String", "")
    return len(pattern) == 1 and bool(replace.get("content"))
