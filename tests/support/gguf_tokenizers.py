"""The tokenizer part of GGUF metadata, made up: byte-level BPE, and a vocabulary with scores."""

from collections.abc import Sequence


def byte_level_metadata(
    tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], /, **changes: object
) -> dict[str, object]:
    """BOS is token 0 and EOS token 1 unless `changes` (keys without their prefix) say otherwise."""
    values: dict[str, object] = {
        "model": "gpt2",
        "tokens": list(tokens),
        "token_type": list(types),
        "merges": list(merges),
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return _prefixed(values | changes)


def sentence_piece_metadata(
    words: Sequence[str], user_defined: Sequence[str] = (), /, **changes: object
) -> dict[str, object]:
    """Ids 0, 1, 2 are <unk>, <s>, </s>, then come 256 bytes, `words` from the best score down, and `user_defined`."""
    special, byte_tokens = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    values: dict[str, object] = {
        "model": "llama",
        "tokens": [*special, *byte_tokens, *words, *user_defined],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(words), *[4] * len(user_defined)],
        "scores": [*[0.0] * 259, *[-float(i) for i in range(len(words))], *[-1000.0] * len(user_defined)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return _prefixed(values | changes)


def _prefixed(values: dict[str, object]) -> dict[str, object]:
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
