from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.gemma.tokenization_gemma import GemmaTokenizer
from transformers.models.llama.tokenization_llama import LlamaTokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from coordinator.text.detokenizer import Detokenizer
from pdserve.core.model_files import open_model_files
from pdserve.core.model_files.gguf_header import read_gguf_header
from pdserve.core.tokenizer import TextTokenizer, load_tokenizer
from pdserve.core.tokenizer.gguf import build_gguf_tokenizer
from tests.coordinator.text_fakes import _CHAR_OF_BYTE, EOS, byte_tokenizer
from tests.support.gguf_tokenizers import byte_level_metadata, sentence_piece_metadata

SMILE = "😊".encode()
SAMPLES = ["日", "本語", "한국", "é", "e\u0301", "\u0301", " the", " ", "\n", "👩‍👩‍👧", "😊", "ß", "a"]
PIECES = sorted({s.encode()[i:j] for s in SAMPLES for i in range(4) for j in range(i + 1, i + 8)} - {b""})
BYTE_LEVEL = byte_tokenizer([piece for piece in PIECES if len(piece) > 1])


def decoded(tokenizer: TextTokenizer, ids: list[int]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer.token_bytes)
    deltas = [detokenizer.push(token_id) for token_id in ids]
    return deltas, "".join(deltas)


def check_against_decode(tokenizer: TextTokenizer, ids: list[int]) -> None:
    """Equal to decoding everything at once, but for one U+FFFD where the ids end inside a character."""
    _, text = decoded(tokenizer, ids)
    whole = tokenizer.decode(ids)
    assert text == whole or (text + "\ufffd" == whole and unfinished(tokenizer, ids))


def unfinished(tokenizer: TextTokenizer, ids: list[int]) -> bool:
    data = b"".join(tokenizer.token_bytes(i) for i in ids)
    for length in range(1, 4):
        try:
            data[-length:].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return True
    return False


@given(st.lists(st.integers(0, BYTE_LEVEL.num_tokens + 3), min_size=1, max_size=200))
def test_any_ids_of_a_byte_level_vocabulary_stream_to_what_decode_gives(ids: list[int]) -> None:
    check_against_decode(BYTE_LEVEL, [i for i in ids if i < BYTE_LEVEL.num_tokens])


@given(st.lists(st.sampled_from(SAMPLES), max_size=40), st.data())
def test_valid_text_survives_any_cut_into_bytes_and_special_tokens(parts: list[str], data: st.DataObject) -> None:
    ids = list("".join(parts).encode())
    for position in sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=5)), reverse=True):
        ids.insert(position, EOS)
    assert decoded(BYTE_LEVEL, ids)[1] == "".join(parts)


def test_each_prefix_ends_with_whole_characters_only() -> None:
    tokenizer = byte_tokenizer([b"Hello", b" " + SMILE[:2], SMILE[2:]])
    ids = [257, ord("!"), 258, 259]
    assert [decoded(tokenizer, ids[:n])[1] for n in range(1, 5)] == ["Hello", "Hello!", "Hello! ", "Hello! 😊"]


def test_ids_without_a_token_add_nothing() -> None:
    assert decoded(BYTE_LEVEL, [97, 10**6, -1, 98])[1] == "ab"


def test_a_character_begun_in_the_prompt_is_completed() -> None:
    assert continued(b"ab\xe6\x97", b"\xa5c") == "日c"
    assert continued(b"\xf0\x9f", b"\x98") == ""
    assert continued(b"\xf0\x9f", b"\x98\x8a") == "😊"
    assert continued(b"\xef\xbf", b"\xbd") == "\ufffd"
    assert continued([0xE6, EOS, 0x97, EOS], [EOS, 0xA5]) == "日"


def test_a_character_that_the_output_does_not_go_on_with_stays_the_prompts() -> None:
    assert continued(b"\xe6\x97", b"abc") == "abc"
    assert continued(b"\xe6\x97", "日".encode()) == "日"
    assert continued(b"\xe0", b"\x80a") == "\ufffda"
    assert continued(b"\xe6", b"\x97a") == "\ufffda"


def test_nothing_of_a_whole_prompt_shows() -> None:
    assert continued("日本".encode(), b"abc") == "abc"
    assert continued(b"\x98\x8a\xff", b"abc") == "abc"
    assert continued(b"", b"\xa5c") == "\ufffdc"


def continued(prompt: Sequence[int], ids: Sequence[int]) -> str:
    detokenizer = Detokenizer(BYTE_LEVEL.token_bytes, prompt)
    return "".join(map(detokenizer.push, ids))


def test_a_long_prompt_costs_no_more_than_its_tail() -> None:
    asked: list[int] = []

    def token_bytes(token_id: int) -> bytes:
        asked.append(token_id)
        return b""

    Detokenizer(token_bytes, range(1_000_000))
    assert len(asked) < 100


@given(st.binary(max_size=8), st.binary(max_size=12))
@example(b"", b"\xed\xa0")
@example(b"\xed", b"\xa0\x80")
def test_prompt_and_output_together_are_the_whole_text(prompt: bytes, output: bytes) -> None:
    """Any bytes: the output's text begins where the prompt's ends, or takes over the character it ended in."""
    text, before, whole = (
        continued(prompt, output),
        BYTE_LEVEL.decode(prompt),
        BYTE_LEVEL.decode(prompt + output),
    )
    starts = [before] + ([before[:-1]] if before.endswith("\ufffd") else [])
    ends = [""] + (["\ufffd"] if unfinished(BYTE_LEVEL, [*prompt, *output]) else [])
    assert whole in [start + text + end for start in starts for end in ends]


def gguf(metadata: dict[str, object]) -> TextTokenizer:
    return TextTokenizer(build_gguf_tokenizer(metadata))


WORDS = ["▁", "▁the", "t", "h", "e", "a", "日", "▁日本", "é"]
SENTENCE_PIECE = sentence_piece_metadata(WORDS, ["  ", "<tool>"])
CLASS_VOCAB = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<mask>"])}
MARKED_VOCAB = CLASS_VOCAB | {token: i + 7 for i, token in enumerate([*(f"<0x{b:02X}>" for b in range(256)), *WORDS])}
BYTES_VOCAB = {"<|endoftext|>": 256} | {char: byte for byte, char in _CHAR_OF_BYTE.items()}

KINDS = {
    "byte level": BYTE_LEVEL,
    "GGUF llama": gguf(SENTENCE_PIECE),
    "GGUF gemma": gguf(SENTENCE_PIECE | {"tokenizer.ggml.add_space_prefix": False}),
    "GGUF tekken": gguf(byte_level_metadata([*_CHAR_OF_BYTE.values()], [1] * 256, [], pre="tekken")),
    "llama": TextTokenizer(LlamaTokenizer(vocab=MARKED_VOCAB, merges=[]).backend_tokenizer),
    "gemma": TextTokenizer(GemmaTokenizer(vocab=MARKED_VOCAB, merges=[]).backend_tokenizer),
    "qwen2": TextTokenizer(Qwen2Tokenizer(vocab=BYTES_VOCAB, merges=[]).backend_tokenizer),
}


def check_cut(tokenizer: TextTokenizer, text: str, cut: int) -> None:
    """Wherever a text's ids are cut into prompt and output, the output's text takes over where the prompt's ends."""
    ids = tokenizer.encode(text, add_special=False)
    prompt, output = ids[:cut], ids[cut:]
    detokenizer = Detokenizer(tokenizer.token_bytes, prompt)
    deltas = "".join(map(detokenizer.push, output))
    text, whole = decoded(tokenizer, prompt)[1] + deltas, tokenizer.decode(ids)
    assert text in {whole, " " + whole}  # some tokenizers drop the space before a text's first word


@pytest.mark.parametrize("kind", KINDS)
@given(parts=st.lists(st.sampled_from(SAMPLES), min_size=1, max_size=30), cut=st.integers(1, 60))
def test_text_cut_anywhere_into_prompt_and_output(kind: str, parts: list[str], cut: int) -> None:
    check_cut(KINDS[kind], "".join(parts), cut)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_ids_behind_a_prompt_stream_to_what_decode_gives(kind: str, data: st.DataObject) -> None:
    """But for bytes that are no UTF-8, where tokenizers differ in how many U+FFFD they show."""
    tokenizer = KINDS[kind]
    prompt = tokenizer.encode("a", add_special=False)
    ids = data.draw(st.lists(st.integers(0, tokenizer.num_tokens + 2), max_size=40))
    ids = [token_id for token_id in ids if not is_part_of_a_character(tokenizer, token_id)]
    whole = tokenizer.decode([*prompt, *(i for i in ids if i < tokenizer.num_tokens)])
    assert tokenizer.decode(prompt) + decoded(tokenizer, ids)[1] == whole


def is_part_of_a_character(tokenizer: TextTokenizer, token_id: int) -> bool:
    return "\ufffd" in tokenizer.token_bytes(token_id).decode(errors="replace")


@pytest.fixture(scope="module")
def real(smollm2: Path) -> TextTokenizer:
    return load_tokenizer(open_model_files(smollm2))


@pytest.mark.model
@given(ids=st.lists(st.integers(0, 49_151), min_size=1, max_size=200))
def test_any_ids_of_the_real_vocabulary(real: TextTokenizer, ids: list[int]) -> None:
    check_against_decode(real, ids)


@pytest.mark.model
@given(parts=st.lists(st.sampled_from(SAMPLES), min_size=1, max_size=60))
def test_encoded_text_comes_back(real: TextTokenizer, parts: list[str]) -> None:
    assert decoded(real, real.encode("".join(parts)))[1] == "".join(parts)


@pytest.mark.model
@given(parts=st.lists(st.sampled_from(SAMPLES), min_size=1, max_size=30), cut=st.integers(1, 60))
@example(parts=["語 日"], cut=2)
def test_real_text_cut_anywhere(real: TextTokenizer, parts: list[str], cut: int) -> None:
    check_cut(real, "".join(parts), cut)


@pytest.fixture(scope="module")
def gemma(gemma3: Path) -> TextTokenizer:
    return TextTokenizer(build_gguf_tokenizer(read_gguf_header(gemma3).metadata))


@pytest.mark.slow
@pytest.mark.model
@given(parts=st.lists(st.sampled_from(SAMPLES), min_size=1, max_size=30), cut=st.integers(1, 60))
def test_real_gemma_text_cut_anywhere(gemma: TextTokenizer, parts: list[str], cut: int) -> None:
    check_cut(gemma, "".join(parts), cut)
    assert gemma.decode(gemma.encode("".join(parts))) == "".join(parts)


@pytest.mark.slow
@pytest.mark.model
@given(ids=st.lists(st.integers(0, 262_143), max_size=60))
def test_any_ids_of_the_real_gemma_vocabulary(gemma: TextTokenizer, ids: list[int]) -> None:
    whole_tokens = [token_id for token_id in ids if not is_part_of_a_character(gemma, token_id)]
    assert decoded(gemma, whole_tokens)[1] == gemma.decode(whole_tokens)
