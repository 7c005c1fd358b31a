"""A byte-level BPE tokenizer with a chat template for checkpoints whose vocabulary is tiny."""

import json
from itertools import product
from pathlib import Path
from string import ascii_lowercase

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_COMMON_PAIRS = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "of")


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level BPE of exactly `vocab_size` (≥ 259) ids: special tokens, the bytes, then merges of two letters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ġ", letter) for letter in ascii_lowercase] + [tuple(pair) for pair in _COMMON_PAIRS]
    pairs += [pair for pair in product(ascii_lowercase, repeat=2) if pair not in pairs]
    merges = pairs[: vocab_size - len(SPECIAL_TOKENS) - len(letters)]
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *letters, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
