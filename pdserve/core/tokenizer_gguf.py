"""A tokenizer built from a GGUF file's metadata: byte-level BPE with the pre-tokenizers listed here."""

from collections.abc import Mapping
from typing import cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from pdserve.core.model_files.config import bad_model, unsupported

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_gguf_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that `metadata` (a GGUF file's key-values) describes.

    Raises:
        PdserveError: UNSUPPORTED, naming the model or pre-tokenizer; INVALID_ARGUMENT, naming a key at fault.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise unsupported(f"GGUF tokenizer model {kind!r} (known: 'gpt2')")
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    if pre not in _PRE_TOKENIZERS:
        raise unsupported(f"GGUF pre-tokenizer {pre!r} (known: {', '.join(sorted(_PRE_TOKENIZERS))})")
    tokens = _string_list(metadata, "tokenizer.ggml.tokens")
    tokenizer = Tokenizer(_bpe(tokens, _string_list(metadata, "tokenizer.ggml.merges"), ignore_merges=pre in _LLAMA3))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type"))
    _add_bos(tokenizer, tokens, metadata, default=pre in _LLAMA3)
    return tokenizer


def _bpe(tokens: list[str], merges: list[str], ignore_merges: bool) -> models.BPE:
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise bad_model("tokenizer.ggml.merges holds something other than pairs")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        return models.BPE(vocab=vocab, merges=cast("list[tuple[str, str]]", pairs), ignore_merges=ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise bad_model(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: object) -> None:
    if types is None:
        return
    if not isinstance(types, list) or len(cast("list[object]", types)) != len(tokens):
        raise bad_model("tokenizer.ggml.token_type is not a list as long as tokenizer.ggml.tokens")
    typed = list(zip(tokens, cast("list[object]", types), strict=True))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, y in typed if y == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, y in typed if y == _USER_DEFINED])


def _add_bos(tokenizer: Tokenizer, tokens: list[str], metadata: Mapping[str, object], default: bool) -> None:
    if metadata.get("tokenizer.ggml.add_bos_token", default) is not True:
        return
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if not isinstance(bos, int) or not 0 <= bos < len(tokens):
        raise bad_model("tokenizer.ggml.bos_token_id is no token although a BOS is asked for")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[f"{tokens[bos]}:0", "$A:0"], special_tokens=[(tokens[bos], bos)]
    )


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_then_byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _llama3() -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(_LLAMA3_WORDS), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_PRE_TOKENIZERS = {
    "smollm": _digits_then_byte_level,
    "gpt-2": _byte_level,
    "default": _byte_level,
    **dict.fromkeys(_LLAMA3, _llama3),
}


def _string_list(metadata: Mapping[str, object], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in cast("list[object]", value)):
        raise bad_model(f"{key} is missing or not a list of strings")
    return cast("list[str]", value)
