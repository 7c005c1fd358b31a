import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_files import ModelFiles, open_model_files
from pdserve.core.tokenizer import TextTokenizer, load_tokenizer


@dataclass(frozen=True)
class StubFiles:
    """The part of ModelFiles that tokenizers are read from."""

    source: Path
    gguf_metadata: None = None


def load(files: StubFiles) -> TextTokenizer:
    return load_tokenizer(cast("ModelFiles", files))


def directory_tokenizer() -> Tokenizer:
    tokens = ["<eos>", "<s>", "a", "b", "Ġ", "Ã", "©", "ab"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<s>", special=True)])
    tokenizer.add_tokens([AddedToken("tool x", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>:0", "$A:0"], special_tokens=[("<s>", 1)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=16)
    return tokenizer


def write_directory(path: Path, **config: object) -> StubFiles:
    directory_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return StubFiles(path)


def test_a_directory_neither_truncates_nor_pads(tmp_path: Path) -> None:
    tokenizer = load(write_directory(tmp_path))
    assert tokenizer.encode("abab a") == [1, 7, 7, 4, 2]
    assert tokenizer.encode("abé", add_special=False) == [7, 5, 6]
    assert tokenizer.num_tokens == 9


def test_bytes_of_tokens(tmp_path: Path) -> None:
    tokenizer = load(write_directory(tmp_path))
    ids = {0: b"", 1: b"", 4: b" ", 5: b"\xc3", 6: b"\xa9", 7: b"ab", 8: b"tool x", 9: b"", -1: b""}
    assert {i: tokenizer.token_bytes(i) for i in ids} == ids
    assert tokenizer.decode([1, 7, 4, 5, 6, 8, 0]) == "ab étool x"


def test_tokens_alone_and_special_tokens_by_name(tmp_path: Path) -> None:
    tokenizer = load(write_directory(tmp_path))
    shown = {0: "<eos>", 1: "<s>", 4: " ", 5: "\ufffd", 7: "ab", 8: "tool x", 9: "", -1: ""}
    assert {i: tokenizer.token_text(i) for i in shown} == shown
    assert [tokenizer.special_token_text(i) for i in (0, 7, 8, 99)] == ["<eos>", "", "", ""]
    assert [tokenizer.special_token_id(text) for text in ("<eos>", "<s>", "ab", "tool x", "")] == [
        0,
        1,
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("T", "T"),
        ([{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}], "D"),
        (["damaged", {"name": ["odd"], "template": 1}], None),
        (None, None),
    ],
)
def test_chat_templates_of_a_directory(tmp_path: Path, template: object, expected: str | None) -> None:
    files = write_directory(tmp_path, chat_template=template, eos_token={"content": "<eos>"}, bos_token="<s>")
    assert load(files).chat_template == expected
    assert load(files).special_tokens == {"eos_token": "<eos>", "bos_token": "<s>"}
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert load(files).chat_template == "own file"


@pytest.mark.parametrize("content", [None, "", "{}", '{"model": {"type": "Nonsense"}}'])
def test_a_broken_tokenizer_file_is_refused_by_name(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(PdserveError, match=r"tokenizer\.json") as caught:
        load(StubFiles(tmp_path))
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC(), None])
def test_decoders_of_other_kinds_are_refused_by_name(decoder: decoders.Decoder | None) -> None:
    tokenizer = directory_tokenizer()
    tokenizer.decoder = decoder  # type: ignore[assignment]
    with pytest.raises(PdserveError, match="tokenizer decoder") as caught:
        TextTokenizer(tokenizer)
    assert caught.value.reason is ErrorReason.UNSUPPORTED


def test_words_written_with_a_space_mark_and_byte_tokens() -> None:
    vocab = {"<unk>": 0, "▁the": 1, "<0xE6>": 2, "<0xzz>": 3}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    table = TextTokenizer(tokenizer)
    assert [table.token_bytes(i) for i in range(4)] == [b"<unk>", b" the", b"\xe6", b"<0xzz>"]


@pytest.fixture(scope="module")
def real(smollm2: Path) -> TextTokenizer:
    return load_tokenizer(open_model_files(smollm2))


@pytest.mark.model
def test_the_real_vocabulary(real: TextTokenizer) -> None:
    assert real.num_tokens == 49_152
    assert len(real.encode("12345")) == 5
    assert real.encode("<|im_start|>a<|im_end|>") == [1, *real.encode("a"), 2]
    assert real.token_bytes(2) == b""
    assert real.special_tokens["eos_token"] == "<|im_end|>"
    assert real.chat_template is not None


@pytest.mark.model
@pytest.mark.parametrize(
    "text", ["Hello, world! It's 2026.", "日本語 и русский\n\n\tx", "def f(x):\n    return x**2\n", "😊👩‍👩‍👧 e\u0301"]
)
def test_the_real_vocabulary_gives_text_back(real: TextTokenizer, text: str) -> None:
    assert real.decode(real.encode(text)) == text


@given(st.text(max_size=200))
def test_no_text_has_fewer_tokens_than_its_lower_bound(tiny_model: Path, text: str) -> None:
    tokenizer = load_tokenizer(open_model_files(tiny_model))
    text = text.encode("utf-8", "replace").decode()
    text *= 8
    assert tokenizer.least_num_tokens(text) <= len(tokenizer.encode(text))


def test_no_lower_bound_where_a_token_swallows_the_spaces_around_it() -> None:
    tokenizer = directory_tokenizer()
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert TextTokenizer(tokenizer).least_num_tokens(" " * 1000 + "<mask>") == 0
