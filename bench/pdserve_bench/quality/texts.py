"""The fixed texts, one a slice, and their token ids. Their bytes are pinned: another text is another measurement."""

from collections.abc import Mapping
from pathlib import Path

import xxhash

from pdserve.core.model_files import open_model_files
from pdserve.core.tokenizer import load_tokenizer

_FOLDER = Path(__file__).parent / "texts"
CHECKSUMS: Mapping[str, str] = {
    "prose": "ae2db59675e2f461",
    "code": "f0c5ee61e3a9e2b8",
    "json": "7bf4b39b2ca6620b",
    "numbers": "f1bd7b0ffa91605f",
    "languages": "6199d9bb6788ce8f",
    "long_context": "aaf7c4ed458754ae",
}
"""xxh3_64 of the bytes of `texts/SLICE.txt`, in the order of the tables."""


def read_text(name: str) -> str:
    """A slice's text.

    Raises:
        ValueError: the file is not the one that earlier results were measured on.
    """
    data = (_FOLDER / f"{name}.txt").read_bytes()
    found = xxhash.xxh3_64_hexdigest(data)
    if found != CHECKSUMS[name]:
        raise ValueError(f"texts/{name}.txt was changed: its xxh3_64 is {found}, not {CHECKSUMS[name]}")
    return data.decode()


def encode_slices(source: Path) -> dict[str, list[int]]:
    """Token ids of every slice by the model's own tokenizer, with what it expects around plain text, such as a BOS."""
    tokenizer = load_tokenizer(open_model_files(source))
    return {name: tokenizer.encode(read_text(name)) for name in CHECKSUMS}
