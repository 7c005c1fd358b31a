r"""Byte-level BPE from a GGUF vocabulary (`tokenizer.ggml.model` "gpt2") and how each named pre-tokenizer splits text.

The expressions are those of the models' own tokenizer.json files; GGUF names only the pre-tokenizer, as llama.cpp does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pdserve.core.model_files.config import bad_model, unsupported
from pdserve.core.tokenizer.gguf_vocab import GgufVocab


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Each expression splits what the one before left; what lies between two matches is a piece as well."""

    expressions: tuple[str, ...]
    nfc: bool = False
    """Whether the text is brought to Unicode's normal form C first."""
    ignore_merges: bool = False
    """Whether a piece that is a token is taken whole, though no merges lead to it."""
    adds_bos: bool = False
    """Where the file does not say whether a BOS is added."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_LINES_AND_SPACES}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_SYMBOLS}|{_LINES_AND_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    rf"|{_LINES_AND_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_PATH_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED_WORDS[0]}|{_CASED_WORDS[1]}|\p{{N}}|{_PATH_SYMBOLS}|{_LINES_AND_SPACES}"
_O200K = (
    rf"{_CASED_WORDS[0]}{_CONTRACTIONS}?|{_CASED_WORDS[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_PATH_SYMBOLS}"
    rf"|{_LINES_AND_SPACES}"
)
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES_AND_SPACES}"
)

_DIGITS_APART = (r"\p{N}", _GPT2)


def _each(names: str, pre_tokenizer: PreTokenizer) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), pre_tokenizer)


PRE_TOKENIZERS = {
    **_each("gpt-2 phi-2 exaone4", PreTokenizer((_GPT2,))),
    **_each("mpt olmo", PreTokenizer((_GPT2,), nfc=True)),
    **_each("smollm starcoder refact codeshell exaone", PreTokenizer(_DIGITS_APART)),
    **_each("command-r", PreTokenizer(_DIGITS_APART, nfc=True)),
    **_each("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    **_each("llama-bpe llama3 llama-v3 falcon3", PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)),
    **_each("dbrx smaug-bpe chatglm-bpe glm4", PreTokenizer((_LLAMA3,))),
    **_each("qwen2 deepseek-r1-qwen", PreTokenizer((_QWEN2,), nfc=True)),
    **_each("stablelm2 hunyuan megrez", PreTokenizer((_QWEN2,))),
    **_each("qwen35", PreTokenizer((_QWEN35,), nfc=True)),
    **_each("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True)),
    **_each("gpt-4o llama4", PreTokenizer((_O200K,))),
    **_each("deepseek-v3", PreTokenizer((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK_V3))),
    **_each(
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")),
    ),
}
"""By the name in `tokenizer.ggml.pre`."""


def build_byte_level_bpe(vocab: GgufVocab) -> Tokenizer:
    """
    Raises:
        PdserveError: UNSUPPORTED, naming the pre-tokenizer; INVALID_ARGUMENT, naming a key at fault.
    """
    pre = _pre_tokenizer(vocab)
    tokenizer = Tokenizer(_bpe(vocab.tokens, vocab.strings("merges"), pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _splits(pre.expressions)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def bos_is_usual(vocab: GgufVocab) -> bool:
    """Whether models with this pre-tokenizer expect a BOS when their file does not say."""
    return _pre_tokenizer(vocab).adds_bos


def _pre_tokenizer(vocab: GgufVocab) -> PreTokenizer:
    name = str(vocab.value("pre", "default"))
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise unsupported(
            f"GGUF pre-tokenizer {name!r} (known: {known}); a directory with the model's tokenizer.json does"
        )
    return PRE_TOKENIZERS[name]


def _splits(expressions: Sequence[str]) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in expressions]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, to_bytes])


def _bpe(tokens: list[str], merges: list[str], ignore_merges: bool) -> models.BPE:
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise bad_model("tokenizer.ggml.merges holds something other than pairs")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        return models.BPE(vocab=vocab, merges=cast("list[tuple[str, str]]", pairs), ignore_merges=ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise bad_model(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
