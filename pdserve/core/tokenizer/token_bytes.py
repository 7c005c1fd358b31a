"""Which bytes each token of a vocabulary adds to a text, read off the tokenizer's decoder. Decodes no sequences."""

from collections.abc import Callable
from typing import cast

from tokenizers import Tokenizer

from pdserve.core.model_files.config import unsupported
from pdserve.core.tokenizer.parts import described

_SPACE_MARK = "▁"


def token_bytes_table(tokenizer: Tokenizer) -> list[bytes]:
    """By token id: its UTF-8 bytes, perhaps part of a character; empty for special tokens and unused ids.

    A vocabulary that strips the space before a text's first word keeps it here: output follows a prompt.

    Raises:
        PdserveError: UNSUPPORTED, naming a decoder of an unknown kind.
    """
    to_bytes = _token_to_bytes(tokenizer)
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        if token_id not in special:
            table[token_id] = to_bytes(token)
    return table


def _token_to_bytes(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    decoder = described(tokenizer.decoder)
    steps = cast("list[dict[str, object]]", decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]
    kinds = [str(step["type"]) for step in steps if not _changes_no_token(step)]
    for known, to_bytes in _KNOWN_DECODERS:
        if kinds == known and all(_replaces_mark(step) for step in steps if step["type"] == "Replace"):
            return to_bytes
    raise unsupported(f"tokenizer decoder {'+'.join(str(step['type']) for step in steps)!r}")


def _changes_no_token(step: dict[str, object]) -> bool:
    """Fuse only joins; Strip from the start removes the space before the first word of a text."""
    return step["type"] == "Fuse" or (step["type"] == "Strip" and step.get("content") == " " and step.get("stop") == 0)


def _replaces_mark(step: dict[str, object]) -> bool:
    return step.get("pattern") == {"String": _SPACE_MARK} and step.get("content") == " "


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE writes a byte as one visible character: printable Latin-1 as itself, the rest from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_of_char()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


def _space_marked(token: str) -> bytes:
    return token.replace(_SPACE_MARK, " ").encode()


def _space_marked_or_byte(token: str) -> bytes:
    """As `_space_marked`; <0x41> stands for the byte 0x41."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return token.encode()
    return _space_marked(token)


_KNOWN_DECODERS: list[tuple[list[str], Callable[[str], bytes]]] = [
    (["ByteLevel"], _byte_level),
    (["Metaspace"], _space_marked),
    (["Replace", "ByteFallback"], _space_marked_or_byte),
    (["ByteFallback", "Metaspace"], _space_marked_or_byte),
]
