import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.text.tool_calls.call_stream import CallStream
from coordinator.text.tool_calls.notations import HERMES, LLAMA3_JSON, MISTRAL, NOTATIONS, Notation
from coordinator.text.tool_calls.values import ToolCallParser

NAMES = frozenset({"weather", "add_2"})
Read = tuple[str, list[tuple[str, object]]]


def parser(notation: Notation, parallel: bool = True) -> CallStream:
    return CallStream(notation, NAMES, parallel)


def read(reader: ToolCallParser, *pieces: str) -> Read:
    """All text shown, and the calls by name and arguments."""
    found = [*(reader.push(piece) for piece in pieces), reader.flush()]
    calls = [(call.name, json.loads(call.arguments)) for piece in found for call in piece.calls]
    return "".join(piece.text for piece in found), calls


def call(name: str = "weather", key: str = "arguments", **arguments: object) -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


PARIS = [("weather", {"city": "Paris"})]
TWO = [*PARIS, ("add_2", {"a": 1, "b": [2]})]
HERMES_TWO = f"<tool_call>\n{call(city='Paris')}\n</tool_call>\n<tool_call>\n{call('add_2', a=1, b=[2])}\n</tool_call>"
MISTRAL_LIST = f"[TOOL_CALLS] [{call(city='Paris')}, {call('add_2', a=1, b=[2])}]"
MISTRAL_NAMED = '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]add_2{"a": 1, "b": [2]}'
LLAMA_TWO = f"{call(key='parameters', city='Paris')}; {call('add_2', 'parameters', a=1, b=[2])}"

WRITTEN: list[tuple[Notation, str, Read]] = [
    (HERMES, HERMES_TWO, ("", TWO)),
    (HERMES, f"Let me look.\n\n{HERMES_TWO}\n\nDone. \n", ("Let me look.Done. \n", TWO)),
    (HERMES, f"<tool_call>{call(city='Paris')}", ("", PARIS)),
    (HERMES, f"<tool_call>{call(city='</tool_call> {')}</tool_call>", ("", [("weather", {"city": "</tool_call> {"})])),
    (
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"city": "a\nb"}}</tool_call>',
        ("", [("weather", {"city": "a\nb"})]),
    ),
    (HERMES, '<tool_call>{"name": "weather"}</tool_call>', ("", [("weather", {})])),
    (MISTRAL, MISTRAL_LIST, ("", TWO)),
    (MISTRAL, MISTRAL_NAMED, ("", TWO)),
    (MISTRAL, f"Well: {MISTRAL_NAMED} then", ("Well:then", TWO)),
    (LLAMA3_JSON, LLAMA_TWO, ("", TWO)),
    (LLAMA3_JSON, f"\n{call(key='parameters', city='Paris')}\n", ("", PARIS)),
    (LLAMA3_JSON, f"{call(key='parameters', city='Paris')} there", ("there", PARIS)),
]
NOT_CALLS = [
    (HERMES, "a < b <tool> <tool_call"),
    (HERMES, "<tool_call>no JSON</tool_call> x"),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {}</tool_call> after'),
    (HERMES, f"<tool_call>{call('delete_everything')}</tool_call>"),
    (HERMES, '<tool_call>{"name": "weather", "arguments": "x"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"x": NaN}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Par'),
    (HERMES, "<tool_call>" + '{"a":' * 5000),
    (HERMES, "\n text \n"),
    (MISTRAL, "[TOOL_CALLS]"),
    (MISTRAL, "[TOOL_CALLS] []"),
    (MISTRAL, "[TOOL_CALLS] no call at all, but words " + "x" * 100),
    (MISTRAL, "[TOOL_CALLS]weather[ARGS]"),
    (MISTRAL, "[TOOL_CALLS]erase[ARGS]{}"),
    (MISTRAL, f"[TOOL_CALLS] [{call(city='Paris')}, {call('erase')}]"),
    (LLAMA3_JSON, f"Call: {call(key='parameters', city='Paris')}"),
    (LLAMA3_JSON, f"{call('erase')} {call(key='parameters')}"),
    (LLAMA3_JSON, '{"a": 1}'),
    (LLAMA3_JSON, ""),
]


@pytest.mark.parametrize(("notation", "text", "expected"), WRITTEN)
def test_calls_are_taken_out_of_the_text(notation: Notation, text: str, expected: Read) -> None:
    assert read(parser(notation), text) == expected
    assert read(parser(notation), *text) == expected


@pytest.mark.parametrize(("notation", "text"), NOT_CALLS)
def test_what_is_no_call_comes_out_as_it_was_written(notation: Notation, text: str) -> None:
    assert read(parser(notation), text) == (text, [])
    assert read(parser(notation), *text) == (text, [])


FRAGMENTS = [text for _, text, _ in WRITTEN] + [text for _, text in NOT_CALLS if len(text) < 500]
FRAGMENTS += ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "{", "}", '"', "\\", " ", "\n", ";", "x", "é"]


@given(st.sampled_from(NOTATIONS), st.lists(st.sampled_from(FRAGMENTS), max_size=6), st.data())
def test_how_the_text_is_cut_changes_nothing(notation: Notation, fragments: list[str], data: st.DataObject) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(parser(notation), *pieces) == read(parser(notation), text)


@given(st.sampled_from(NOTATIONS), st.text(max_size=50))
def test_without_calls_nothing_is_lost(notation: Notation, text: str) -> None:
    assert read(parser(notation), *text) == (text, [])


@pytest.mark.parametrize("notation", NOTATIONS)
def test_ordinary_text_is_not_held_back(notation: Notation) -> None:
    reader = parser(notation)
    shown = "".join(reader.push(char).text for char in "One, two < three [4")
    assert "One, two < three [4".startswith(shown)
    assert len(shown) >= len("One, two < three")


def test_a_call_is_given_as_soon_as_it_is_complete() -> None:
    for notation, text in ((HERMES, HERMES_TWO), (MISTRAL, MISTRAL_NAMED), (LLAMA3_JSON, LLAMA_TWO)):
        reader = parser(notation)
        pieces = [reader.push(char) for char in text]
        first = next(i for i, piece in enumerate(pieces) if piece.calls)
        assert first < len(text) / 2 + 10
        assert len(pieces[-1].calls) == 1, notation.name


def test_only_the_first_call_is_given_where_one_is_wanted() -> None:
    for notation, text in ((HERMES, HERMES_TWO), (MISTRAL, MISTRAL_LIST), (LLAMA3_JSON, LLAMA_TWO)):
        assert read(parser(notation, parallel=False), text) == ("", PARIS)


def test_ids_have_the_form_that_the_templates_take_back() -> None:
    for notation, text, form in ((HERMES, HERMES_TWO, r"call_\w{24}"), (MISTRAL, MISTRAL_LIST, r"[A-Za-z0-9]{9}")):
        ids = [call.id for call in parser(notation).push(text).calls]
        assert len(set(ids)) == 2
        assert all(re.fullmatch(form, call_id) for call_id in ids)


def test_a_lone_surrogate_in_the_arguments_stays_an_escape() -> None:
    (found,) = parser(HERMES).push('<tool_call>{"name": "weather", "arguments": {"é": "\\ud800"}}</tool_call>').calls
    assert found.arguments.encode()
    assert json.loads(found.arguments) == {"é": "\ud800"}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("notation", NOTATIONS)
def test_endless_white_space_costs_what_it_is_long(notation: Notation) -> None:
    """Gone through anew for each character, it would stop the event loop for a minute."""
    space = " \n" * 500_000
    assert read(parser(notation), *(space[:100] for _ in range(10_000)), "x") == (space + "x", [])
