"""A tiny checkpoint whose greedy answer to a given prompt begins with an EOS."""

import json
from pathlib import Path

from tests.support.engine_harness import build_engine
from tests.support.tiny_models import write_tiny_llama


def write_with_eos_first(directory: Path, prompt: list[int]) -> int:
    """A checkpoint that answers `prompt`, greedily, with an EOS as its first token; that token."""
    write_tiny_llama(directory, context_length=512)
    (token,) = build_engine(directory).generate(prompt, 1)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": token}))
    return token
