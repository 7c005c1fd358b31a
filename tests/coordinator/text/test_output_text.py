import itertools

import pytest

from coordinator.text.output_text import OutputText
from pdserve.core.sampling import SamplingParams
from tests.coordinator.text_fakes import EOS, byte_tokenizer


def output(stop: list[str], extra: list[bytes] | None = None, **sampling: object) -> OutputText:
    params = SamplingParams(max_tokens=99, **sampling)  # type: ignore[arg-type]
    return OutputText(byte_tokenizer(extra or []), params, frozenset({EOS}), stop)


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
    assert text.flush() == "ab"


@pytest.mark.parametrize(
    ("sampling", "shown"), [({}, "a"), ({"ignore_eos": True}, "a"), ({"stop_token_ids": {98}}, "a")]
)
def test_the_text_of_a_token_that_ends_the_sequence_is_not_shown(sampling: dict[str, object], shown: str) -> None:
    text = output([], **sampling)
    last = 98 if "stop_token_ids" in sampling else EOS
    assert text.push([97, last]).text == shown
    assert text.num_tokens == 2
