from hypothesis import given
from hypothesis import strategies as st

from coordinator.text.stop_strings import StopMatcher

TEXTS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def feed(matcher: StopMatcher, pieces: list[str]) -> str:
    sent = "".join(matcher.push(piece) for piece in pieces)
    return sent if matcher.matched else sent + matcher.flush()


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """Straight from the rule: cut before the match that is complete first, the longest of those ending there."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(TEXTS, STOPS, st.data())
def test_the_result_depends_on_the_characters_and_not_on_the_pieces(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matcher = StopMatcher(stops)
    assert (feed(matcher, pieces), matcher.matched is not None) == expected(text, stops)


@given(TEXTS, STOPS)
def test_never_more_held_back_than_the_longest_stop_less_one_and_nothing_taken_back(
    text: str, stops: list[str]
) -> None:
    final, _ = expected(text, stops)
    matcher = StopMatcher(stops)
    sent = ""
    for count, char in enumerate(text, start=1):
        sent += matcher.push(char)
        assert final.startswith(sent)
        if matcher.matched:
            break
        assert count - len(sent) <= max((len(stop) - 1 for stop in stops), default=0)


def test_a_stop_that_ends_inside_a_token() -> None:
    matcher = StopMatcher(["Pari"])
    assert matcher.push(" Paris") == " "
    assert matcher.matched == "Pari"
    assert matcher.push(" more") == ""


def test_a_failed_start_is_sent_on() -> None:
    matcher = StopMatcher(["aab"])
    assert [matcher.push(char) for char in "aaab"] == ["", "", "a", ""]
    assert matcher.matched == "aab"
