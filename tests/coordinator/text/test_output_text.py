import itertools

import pytest
from tokenizers import Tokenizer, decoders, models

from coordinator.text.output_text import OutputText, TextPiece, prompt_token_texts
from coordinator.text.tool_calls import ToolCall, ToolPiece
from pdserve.core.sampling import SamplingParams
from pdserve.core.tokenizer import TextTokenizer
from tests.coordinator.text_fakes import EOS, byte_tokenizer


def output(stop: list[str], extra: list[bytes] | None = None, **sampling: object) -> OutputText:
    params = SamplingParams(max_tokens=99, **sampling)  # type: ignore[arg-type]
    return OutputText(byte_tokenizer(extra or []), (), params, frozenset({EOS}), stop)


def splits(text: bytes) -> list[list[bytes]]:
    """Every way to cut `text` into tokens."""
    cuts = itertools.product([False, True], repeat=len(text) - 1)
    result: list[list[bytes]] = []
    for cut in cuts:
        positions = [0, *(i + 1 for i, here in enumerate(cut) if here), len(text)]
        result.append([text[a:b] for a, b in itertools.pairwise(positions)])
    return result


def test_a_stop_string_is_found_however_the_text_is_cut_into_tokens() -> None:
    for tokens in splits(b"DEFGHIJKL"):
        extra = sorted({token for token in tokens if len(token) > 1})
        ids = [257 + extra.index(token) if len(token) > 1 else token[0] for token in tokens]
        text = output(["DEFGHIJ"], extra)
        shown = ""
        for token_id in ids:
            shown += text.push([token_id]).text
            if text.stopped:
                break
        assert (shown, text.stopped) == ("", True)


def test_tokens_after_the_stop_string_are_not_taken() -> None:
    text = output(["b"])
    piece = text.push(b"abcd")
    assert (piece.text, piece.token_ids, text.num_tokens, text.stopped) == ("a", (97, 98), 2, True)


def test_text_held_back_comes_with_the_end() -> None:
    text = output(["abc"])
    assert text.push(b"xab").text == "x"
    assert text.flush().text == "ab"


@pytest.mark.parametrize(
    ("sampling", "shown"), [({}, "a"), ({"ignore_eos": True}, "a"), ({"stop_token_ids": {98}}, "a")]
)
def test_the_text_of_a_token_that_ends_the_sequence_is_not_shown(sampling: dict[str, object], shown: str) -> None:
    text = output([], **sampling)
    last = 98 if "stop_token_ids" in sampling else EOS
    assert text.push([97, last]).text == shown
    assert text.num_tokens == 2


def test_each_token_has_its_own_text_before_anything_is_cut() -> None:
    text = output(["DE"], [b"abcD", "é".encode()[:1]])
    first, second = text.push([257, 258, 0xA9]), text.push([ord("E"), EOS])
    assert (first.token_texts, first.text) == (("abcD", "", "é"), "abcDé")
    assert (second.token_texts, second.text) == (("E", ""), "E")


def test_a_character_begun_in_the_prompt_is_completed() -> None:
    smile = "😊".encode()
    text = OutputText(byte_tokenizer(), list(b"hi" + smile[:2]), SamplingParams(9), frozenset({EOS}), [])
    assert text.push(smile[2:]).text == "😊"


class BracketParser:
    """A call is what stands in brackets; EOS is part of the notation."""

    visible_tokens = frozenset({EOS})

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> ToolPiece:
        self._held += text
        before, bracket, call = self._held.partition("[")
        if not bracket:
            self._held = ""
            return ToolPiece(before)
        name, end, rest = call.partition("]")
        self._held = rest if end else bracket + call
        return ToolPiece(before, (ToolCall("1", name, "{}"),) if end else ())

    def flush(self) -> ToolPiece:
        held, self._held = self._held, ""
        return ToolPiece(held)


def with_parser(stop: list[str], **sampling: object) -> OutputText:
    params = SamplingParams(99, **sampling)  # type: ignore[arg-type]
    return OutputText(byte_tokenizer(), (), params, frozenset({EOS}), stop, BracketParser())


def test_calls_are_taken_out_of_the_text() -> None:
    text = with_parser([])
    pieces = [text.push(b"ab[c"), text.push(b"d]e"), text.flush()]
    assert [(p.text, [call.name for call in p.tool_calls]) for p in pieces] == [("ab", []), ("", ["cd"]), ("e", [])]


def test_what_neither_a_stop_string_nor_a_call_came_of_is_text() -> None:
    text = with_parser(["STOP"])
    assert text.push(b"a[bS").text == "a"
    assert text.flush() == TextPiece("[bS")


def test_a_stop_string_ends_a_call_that_is_not_complete() -> None:
    text = with_parser(["STOP"])
    assert text.push(b"a[bSTOPc]").text == "a"
    assert text.stopped
    assert text.flush() == TextPiece("[b")


def test_special_tokens_of_a_notation_are_shown_to_its_parser() -> None:
    text = with_parser([], ignore_eos=True)
    assert text.push([EOS, 97]).text == "<eos>a"


def test_a_prompts_texts_are_what_its_tokens_add() -> None:
    ids = [*b"a\xc3", 0xA9, EOS, *b"b\xf0\x9f"]
    assert prompt_token_texts(byte_tokenizer(), ids) == ("a", "", "é", "", "b", "", "")
    assert prompt_token_texts(byte_tokenizer(), [EOS]) == ("",)
    assert prompt_token_texts(byte_tokenizer(), list(b" a")) == (" ", "a")


def test_a_space_that_the_tokenizer_puts_before_a_text_is_not_echoed() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"▁Hi": 0, "▁you": 1}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    assert prompt_token_texts(TextTokenizer(tokenizer), [0, 1]) == ("Hi", " you")
