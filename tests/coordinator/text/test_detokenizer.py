from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from coordinator.text.detokenizer import Detokenizer
from pdserve.core.model_files import open_model_files
from pdserve.core.tokenizer import TextTokenizer, load_tokenizer
from tests.coordinator.text_fakes import EOS, byte_tokenizer

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


def space_marked_tokenizer() -> TextTokenizer:
    vocab = {"<unk>": 0, "<s>": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    for word in ["▁", "▁the", "a", "日", "▁日本", "é"]:
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return TextTokenizer(tokenizer)


SPACE_MARKED = space_marked_tokenizer()


@given(st.lists(st.one_of(st.integers(258, 263), st.sampled_from(SAMPLES), st.just(1)), max_size=60))
def test_space_marked_vocabularies_keep_the_spaces_between_words(parts: list[int | str]) -> None:
    """Decode runs behind a prompt's token, so that its removal of a text's first space falls on the prompt."""
    ids = [i for part in parts for i in ([part] if isinstance(part, int) else [b + 2 for b in part.encode()])]
    prompt = [260]
    assert "a" + decoded(SPACE_MARKED, ids)[1] == SPACE_MARKED.decode([*prompt, *ids])


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
