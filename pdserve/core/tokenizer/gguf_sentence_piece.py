"""SentencePiece's BPE from a GGUF vocabulary with scores (`tokenizer.ggml.model` "llama": Llama 2, Mistral 7B, Gemma).

Of all neighbouring pieces whose concatenation is a token, those with the highest score join first; characters without a
token become byte tokens. Source: https://github.com/google/sentencepiece, bpe_model.cc.
"""

from dataclasses import replace

from tokenizers import Tokenizer, decoders, models, normalizers

from pdserve.core.model_files.config import bad_model
from pdserve.core.tokenizer.gguf_vocab import GgufVocab, TokenType

_SPACE = "▁"


def build_sentence_piece(vocab: GgufVocab) -> Tokenizer:
    """
    Raises:
        PdserveError: INVALID_ARGUMENT, naming a key at fault.
    """
    spaced = vocab.flag("add_space_prefix", True)
    tokenizer = Tokenizer(_bpe(vocab))
    to_mark = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), to_mark]) if spaced else to_mark
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if spaced else steps)
    return tokenizer


def with_plain_spaces(vocab: GgufVocab) -> GgufVocab:
    """User-defined tokens are found in the text as it came, so they must spell runs of spaces as spaces."""
    taken = set(vocab.tokens)
    tokens = list(vocab.tokens)
    for token_id, kind in enumerate(vocab.types):
        spaced = tokens[token_id].replace(_SPACE, " ")
        if kind == TokenType.USER_DEFINED and len(spaced) > 1 and spaced not in taken:
            tokens[token_id] = spaced
    return replace(vocab, tokens=tokens)


def _bpe(vocab: GgufVocab) -> models.BPE:
    unknown = vocab.token_id("unknown_token_id") if vocab.value("unknown_token_id") is not None else 0
    if unknown is None or not vocab.tokens:
        raise bad_model("tokenizer.ggml.unknown_token_id is no token")
    ids = {token: token_id for token_id, token in enumerate(vocab.tokens)}
    try:
        return models.BPE(
            vocab=ids, merges=_merges(vocab), unk_token=vocab.tokens[unknown], fuse_unk=True, byte_fallback=True
        )
    except Exception as error:  # the library raises bare Exception
        raise bad_model(f"tokenizer.ggml.tokens makes no BPE: {error}") from error


def _merges(vocab: GgufVocab) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best score first. Only text that training found takes part."""
    scores = vocab.floats("scores")
    normal = [token_id for token_id, kind in enumerate(vocab.types) if kind == TokenType.NORMAL]
    words = [vocab.tokens[token_id] for token_id in sorted(normal, key=lambda token_id: -scores[token_id])]
    known = set(words)
    pairs = ((word[:at], word[at:]) for word in words for at in range(1, len(word)))
    return [pair for pair in pairs if pair[0] in known and pair[1] in known]
