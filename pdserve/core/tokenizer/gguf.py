"""A tokenizer built from a GGUF file's metadata: which kind it is, its special tokens, its BOS and EOS.

How each kind splits text and merges is in `gguf_bpe` and `gguf_sentence_piece`.
"""

from collections.abc import Mapping

from tokenizers import AddedToken, Tokenizer, processors

from pdserve.core.model_files.config import bad_model, unsupported
from pdserve.core.tokenizer.gguf_bpe import bos_is_usual, build_byte_level_bpe
from pdserve.core.tokenizer.gguf_sentence_piece import build_sentence_piece, with_plain_spaces
from pdserve.core.tokenizer.gguf_vocab import GgufVocab, TokenType, read_gguf_vocab

_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)


def build_gguf_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that `metadata` (a GGUF file's key-values) describes.

    Raises:
        PdserveError: UNSUPPORTED, naming the model or pre-tokenizer; INVALID_ARGUMENT, naming a key at fault.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        vocab = read_gguf_vocab(metadata)
        tokenizer, adds_bos = build_byte_level_bpe(vocab), bos_is_usual(vocab)
    elif kind == "llama":
        vocab = with_plain_spaces(read_gguf_vocab(metadata))
        tokenizer, adds_bos = build_sentence_piece(vocab), True
    else:
        raise unsupported(
            f"GGUF tokenizer model {kind!r} (known: 'gpt2', 'llama'); a directory with a tokenizer.json may do"
        )
    _add_tokens(tokenizer, vocab)
    _surround(tokenizer, vocab, adds_bos)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, vocab: GgufVocab) -> None:
    typed = list(zip(vocab.tokens, vocab.types, strict=True))
    special = [AddedToken(token, special=True, normalized=False) for token, kind in typed if kind in _SPECIAL]
    plain = [AddedToken(token, normalized=False) for token, kind in typed if kind == TokenType.USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _surround(tokenizer: Tokenizer, vocab: GgufVocab, adds_bos: bool) -> None:
    """BOS in front of plain text and EOS behind it, where the file or the kind of tokenizer asks for them."""
    bos = ["bos"] if vocab.flag("add_bos_token", adds_bos) else []
    eos = ["eos"] if vocab.flag("add_eos_token", False) else []
    if bos or eos:
        named = [_special_token(vocab, name) for name in bos + eos]
        tokenizer.post_processor = processors.TemplateProcessing(single=[*bos, "$A", *eos], special_tokens=named)


def _special_token(vocab: GgufVocab, name: str) -> dict[str, object]:
    token_id = vocab.token_id(f"{name}_token_id")
    if token_id is None:
        raise bad_model(f"tokenizer.ggml.{name}_token_id is no token although {name.upper()} is to be added")
    return {"id": name, "ids": [token_id], "tokens": [vocab.tokens[token_id]]}
