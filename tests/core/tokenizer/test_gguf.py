"""Tokenizers from GGUF metadata: byte-level BPE with its pre-tokenizers, and SentencePiece's BPE from scores."""

import itertools
import unicodedata
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_files.gguf_header import read_gguf_header
from pdserve.core.tokenizer import TextTokenizer
from pdserve.core.tokenizer.gguf import build_gguf_tokenizer
from pdserve.core.tokenizer.gguf_bpe import PRE_TOKENIZERS
from tests.support.gguf_tokenizers import byte_level_metadata, sentence_piece_metadata


def load(metadata: Mapping[str, object]) -> TextTokenizer:
    return TextTokenizer(build_gguf_tokenizer(metadata))


def small(pre: str, **changes: object) -> dict[str, object]:
    return byte_level_metadata(
        ["<s>", "<eos>", "a", "b", "1", "2", "Ġ", "12", "ab", "<user>", "<unk>"],
        [3, 3, 1, 1, 1, 1, 1, 1, 1, 4, 2],
        ["1 2", "a b"],
        pre=pre,
        **changes,
    )


@pytest.mark.parametrize(
    ("pre", "ids"),
    [
        ("smollm", [4, 5, 6, 8, 1, 9, 10]),
        ("gpt-2", [7, 6, 8, 1, 9, 10]),
        ("default", [7, 6, 8, 1, 9, 10]),
        ("llama-bpe", [0, 7, 6, 8, 1, 9, 10]),
        ("tekken", [0, 4, 5, 6, 8, 1, 9, 10]),
        ("qwen2", [4, 5, 6, 8, 1, 9, 10]),
    ],
)
def test_digits_special_and_user_defined_tokens_and_bos(pre: str, ids: list[int]) -> None:
    tokenizer = load(small(pre))
    assert tokenizer.encode("12 ab<eos><user><unk>") == ids
    assert tokenizer.decode(ids) == "12 ab<user>"
    assert [tokenizer.special_token_text(i) for i in (0, 1, 9, 10)] == ["<s>", "<eos>", "", "<unk>"]


def test_bos_and_eos_as_the_file_says() -> None:
    assert load(small("smollm", add_bos_token=True)).encode("ab") == [0, 8]
    assert load(small("smollm", add_bos_token=True, add_eos_token=True)).encode("ab") == [0, 8, 1]
    assert load(small("llama-bpe", add_bos_token=False)).encode("ab") == [8]
    assert load(small("llama-bpe")).encode("ab", add_special=False) == [8]


def test_a_bos_may_hold_any_character() -> None:
    tokens = ["<s:0 $A>", "a"]
    metadata = byte_level_metadata(tokens, [3, 1], [], pre="smollm", add_bos_token=True, bos_token_id=0)
    assert load(metadata).encode("a") == [0, 1]


PIECES = {
    "gpt-2": "I|'ll| pay|  | 1234|...|\n\n| Ünïcode",
    "smollm": "I|'ll| pay|     |1|2|3|4|...|\n\n",
    "llama-bpe": "I|'LL| pay|  | |123|4|...\n\n|x|_under|\n \n|  ",
    "qwen2": "I|'ll| pay| |1|2|...\n\n|xÅÄ|(foo| bar",
    "qwen35": "नमस्ते| दुनिया|1|2|!?\n",
    "tekken": "I|'ll| pay|Camel|Case|HTTPs| |1|2|...//\n\n",
    "gpt-4o": "I'll| pay|Camel's|Case| |123|4|.../\n",
    "deepseek-v3": "Hello| world|!|123|4|漢字ひらカナ|한국어|.foo|  | bar|\n\n",
    "deepseek-coder": "def| foo|(|1|2| |漢字|\n|\n",
    "default": "a|.|b| |123|4|  | c",
}


@pytest.mark.parametrize("pre", PIECES)
def test_pieces_that_pre_tokenizers_make(pre: str) -> None:
    pieces = [piece for piece in PIECES[pre].split("|") if piece]
    pre_tokenizer = build_gguf_tokenizer(small(pre)).pre_tokenizer
    assert pre_tokenizer is not None
    found = [piece for piece, _ in pre_tokenizer.pre_tokenize_str("".join(pieces))]
    assert [bytes(BYTE_OF[char] for char in piece).decode() for piece in found] == pieces


BYTE_OF = {char: byte for byte, char in bytes_to_unicode().items()}
ALPHABET = [bytes_to_unicode()[byte] for byte in range(256)]
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8), st.sampled_from(["  ", "\n\n", "\r\n", "'LL", "123", "日本", "😊", "e\u0301", "/\n"])
    )
).map("".join)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@given(text=TEXTS)
def test_every_pre_tokenizer_gives_the_text_back(pre: str, text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    tokenizer = BYTE_LEVEL[pre]
    ids = tokenizer.encode(text, add_special=False)
    whole = tokenizer.decode(ids)
    assert whole == (unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].nfc else text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == whole


@given(st.text(alphabet="e\u0301\u0300\u0345\u03b1\u0313 a\u1100\u1161\u11a8\U0001d15e\u0958", max_size=80))
@example("\u03b1\u0313\u0300\u0345")
def test_no_text_has_fewer_tokens_than_its_lower_bound(text: str) -> None:
    for tokenizer in (BYTE_LEVEL["qwen2"], BYTE_LEVEL["smollm"], SPACED, UNSPACED):
        assert tokenizer.least_num_tokens(text * 8) <= len(tokenizer.encode(text * 8, add_special=False))
        assert tokenizer.least_num_tokens("a" * 1000) > 0


BYTE_LEVEL = {
    pre: load(byte_level_metadata(ALPHABET, [1] * 256, [], pre=pre, bos_token_id=0)) for pre in PRE_TOKENIZERS
}


def test_pieces_that_are_tokens_need_no_merges_where_the_model_says_so() -> None:
    metadata = byte_level_metadata(["<s>", "a", "b", "ab"], [3, 1, 1, 1], [], pre="llama-bpe", add_bos_token=False)
    assert load(metadata).encode("ab") == [3]
    assert load(metadata | {"tokenizer.ggml.pre": "qwen2"}).encode("ab") == [1, 2]


@pytest.mark.parametrize(
    ("metadata", "reason", "named"),
    [
        (small("kimi-k2"), ErrorReason.UNSUPPORTED, r"kimi-k2.*qwen2.*tokenizer\.json"),
        (small("smollm", model="bert"), ErrorReason.UNSUPPORTED, "bert"),
        (small("smollm", model="t5"), ErrorReason.UNSUPPORTED, "t5"),
        (small("smollm", model=None), ErrorReason.UNSUPPORTED, "None"),
        (small("smollm", tokens=None), ErrorReason.INVALID_ARGUMENT, "tokens"),
        (small("smollm", tokens=["a", 1]), ErrorReason.INVALID_ARGUMENT, "tokens"),
        (small("smollm", merges=["a"]), ErrorReason.INVALID_ARGUMENT, "merges"),
        (small("smollm", merges=["a x"]), ErrorReason.INVALID_ARGUMENT, "merges"),
        (small("smollm", token_type=[1]), ErrorReason.INVALID_ARGUMENT, "token_type"),
        (small("smollm", add_bos_token=True, bos_token_id=99), ErrorReason.INVALID_ARGUMENT, "bos_token_id"),
        (small("smollm", add_eos_token=True, eos_token_id=-1), ErrorReason.INVALID_ARGUMENT, "eos_token_id"),
        (sentence_piece_metadata(["ab"], scores=None), ErrorReason.INVALID_ARGUMENT, "scores"),
        (sentence_piece_metadata(["ab"], scores=[1.0]), ErrorReason.INVALID_ARGUMENT, "scores"),
        (sentence_piece_metadata(["ab"], unknown_token_id=10**6), ErrorReason.INVALID_ARGUMENT, "unknown_token_id"),
        (sentence_piece_metadata(["ab"], bos_token_id=None), ErrorReason.INVALID_ARGUMENT, "bos_token_id"),
    ],
)
def test_metadata_at_fault_is_refused_by_name(metadata: dict[str, object], reason: ErrorReason, named: str) -> None:
    with pytest.raises(PdserveError, match=named) as caught:
        load(metadata)
    assert caught.value.reason is reason


LLAMA = sentence_piece_metadata(["▁", "a", "b", "▁a", "ab", "▁ab", "日", "本", "日本"], ["<tool>", "  "])
FIRST = 259  # <unk>, <s>, </s> and 256 bytes come before


def spelled(tokenizer: TextTokenizer, text: str, add_special: bool = False) -> str:
    return "|".join(map(tokenizer.token_text, tokenizer.encode(text, add_special)))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("ab", " ab"),
        (" ab", " | ab"),
        ("a b", " a| |b"),
        ("日本", " |日本"),
        ("a<tool>b", " a|<tool>| |b"),
        ("a<s>b", " a|<s>| |b"),
        ("a  b", " a|  | |b"),
        ("a\nb", " a|\n|b"),
        ("", ""),
    ],
)
def test_words_of_a_vocabulary_with_a_space_before_the_first(text: str, tokens: str) -> None:
    assert spelled(load(LLAMA), text) == tokens


def test_without_the_space_before_the_first_word() -> None:
    tokenizer = load(LLAMA | {"tokenizer.ggml.add_space_prefix": False})
    assert spelled(tokenizer, "ab a<tool>b") == "ab| a|<tool>|b"
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def test_bos_comes_first_unless_the_file_says_otherwise() -> None:
    assert spelled(load(LLAMA), "a", add_special=True) == "<s>| a"
    assert spelled(load(LLAMA | {"tokenizer.ggml.add_bos_token": False}), "a", add_special=True) == " a"
    assert spelled(load(LLAMA | {"tokenizer.ggml.add_eos_token": True}), "a", add_special=True) == "<s>| a|</s>"


def test_text_that_spells_a_byte_token_is_text() -> None:
    tokenizer = load(LLAMA)
    assert tokenizer.encode("é", add_special=False) == [FIRST, 0xC3 + 3, 0xA9 + 3]
    assert tokenizer.decode(tokenizer.encode("<0x41>")) == "<0x41>"
    pieces = sentence_piece_metadata([*"<0x41>", "<0", "x4", "<0x4", "1>"], add_space_prefix=False)
    assert spelled(load(pieces), "<0x41>") == "<0x4|1>"


def test_a_user_defined_token_stored_with_space_marks_matches_spaces() -> None:
    tokenizer = load(sentence_piece_metadata(["▁", "a"], ["▁▁"], add_space_prefix=False))
    assert tokenizer.encode("a  a", add_special=False) == [FIRST + 1, FIRST + 2, FIRST + 1]
    assert tokenizer.token_bytes(FIRST + 2) == b"  "


@given(TEXTS, st.booleans())
def test_any_text_comes_back(text: str, spaced: bool) -> None:
    text = text.encode("utf-8", "replace").decode()
    assume("▁" not in text)
    tokenizer = SPACED if spaced else UNSPACED
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    data = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert data == (" " + text if spaced and text else text)


SPACED = load(sentence_piece_metadata(["▁", "a", "▁a", "日", "本", "日本"]))
UNSPACED = load(LLAMA | {"tokenizer.ggml.add_space_prefix": False})


@st.composite
def grown_vocabularies(draw: st.DrawFn) -> list[str]:
    """Words joined from earlier ones, as training finds them, best first."""
    words = ["a", "b", "c"]
    for _ in range(draw(st.integers(0, 12))):
        word = draw(st.sampled_from(words)) + draw(st.sampled_from(words))
        if word not in words:
            words.append(word)
    return words


def joined_by_score(text: str, words: list[str]) -> list[str]:
    """SentencePiece's own rule, step by step: the best-scored join anywhere, the leftmost of equals."""
    pieces = list(text)
    while True:
        joins = [(words.index(a + b), i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in words]
        if not joins:
            return pieces
        at = min(joins)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def has_rival_splits(words: list[str]) -> bool:
    """Whether a word overlaps itself so that two ways to join it compete; merges then go by split, not by place."""
    splits = [(w, w[:i], w[i:]) for w in words for i in range(1, len(w)) if w[:i] in words and w[i:] in words]
    return any(v == w and q == r and len(p) > len(q) for v, p, q in splits for w, r, _ in splits)


@given(grown_vocabularies(), st.text(alphabet="abc", max_size=30))
def test_merges_from_scores_join_as_sentence_piece_does(words: list[str], text: str) -> None:
    assume(not has_rival_splits(words))
    tokenizer = load(sentence_piece_metadata(words, add_space_prefix=False))
    ids = tokenizer.encode(text, add_special=False)
    assert list(map(tokenizer.token_text, ids)) == joined_by_score(text, words)


@pytest.fixture(scope="module")
def gemma(gemma3: Path) -> TextTokenizer:
    return load(read_gguf_header(gemma3).metadata)


GEMMA_TEXTS = [
    "Hello, world! It's 2026.",
    "  leading and trailing   ",
    "a  b   c\n\n\nx\n\r\n    \n",
    "日本語 и русский\n\n\tx",
    "def f(x):\n    return x**2\n",
    "😊👩‍👩‍👧 e\u0301 𒀀 \x00\x01",
    "<table><tr>",
]


@pytest.mark.slow
@pytest.mark.model
def test_the_real_gemma_vocabulary_agrees_with_transformers(gemma3: Path, gemma: TextTokenizer) -> None:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, described, _ = get_gguf_tokenizer(str(gemma3))
    oracle, _ = convert_gguf_tokenizer(architecture, described)
    for text in GEMMA_TEXTS:
        ids = gemma.encode(text, add_special=False)
        assert ids == oracle.encode(text, add_special_tokens=False).ids
        assert gemma.decode(ids) == text
        assert b"".join(map(gemma.token_bytes, ids)).decode() == text


@pytest.mark.slow
@pytest.mark.model
def test_the_special_tokens_of_the_real_gemma_vocabulary(gemma: TextTokenizer) -> None:
    assert gemma.num_tokens == 262_144
    assert gemma.encode("<start_of_turn>user\n") == [2, 105, *gemma.encode("user\n", add_special=False)]
    assert gemma.special_token_id("<end_of_turn>") == 106
    assert gemma.least_num_tokens("a" * 10_000) > 0
