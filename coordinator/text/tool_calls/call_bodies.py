"""How calls are written, notation by notation: where a body ends, and which calls it holds. Knows no stream."""

import json
import re
from collections.abc import Mapping
from enum import Enum
from typing import Protocol, cast

from coordinator.text.stop_strings import StopMatcher

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_HEAD_CHARS = 96

WrittenCall = tuple[str, Mapping[str, object]]
"""A function's name and its arguments."""


class Progress(Enum):
    OPEN = "more is needed"
    DONE = "the body ends here"
    BROKEN = "this is no body"


class CallBody(Protocol):
    """One body, character by character; `calls` reads its whole text, or tells by None that it is malformed."""

    def advance(self, char: str) -> Progress: ...

    def calls(self, text: str) -> list[WrittenCall] | None: ...


class TaggedJson:
    """`{"name": …, "arguments": {…}}` up to a closing tag (Hermes, Qwen). A tag inside a JSON string closes nothing."""

    CLOSING = "</tool_call>"

    def __init__(self) -> None:
        self._scan = _JsonScan()
        self._closing = StopMatcher([self.CLOSING])

    def advance(self, char: str) -> Progress:
        if not self._scan.begun and not char.isspace() and char != "{":
            return Progress.BROKEN
        self._scan.advance(char)
        self._closing.push(char)
        if self._closing.matched is None:
            return Progress.OPEN
        self._closing = StopMatcher([self.CLOSING])
        return Progress.OPEN if self._scan.in_string else Progress.DONE

    def calls(self, text: str) -> list[WrittenCall] | None:
        return _calls([_json(text.removesuffix(self.CLOSING))])


class ListOrNamed:
    """`[{"name": …, "arguments": {…}}, …]`, or `name[ARGS]{…}` of later versions (Mistral)."""

    _HEAD = re.compile(rf"\s*({NAME.pattern})\s*(?:\[ARGS\])?\s*")

    def __init__(self) -> None:
        self._scan = _JsonScan()
        self._head = ""

    def advance(self, char: str) -> Progress:
        if self._scan.begun or (char == "[" and not self._head.strip()):
            return Progress.DONE if self._scan.advance(char) else Progress.OPEN
        if char == "{" and self._HEAD.fullmatch(self._head):
            self._scan.advance(char)
            return Progress.OPEN
        self._head += char
        return Progress.BROKEN if char == "{" or len(self._head) > MAX_HEAD_CHARS else Progress.OPEN

    def calls(self, text: str) -> list[WrittenCall] | None:
        if named := self._HEAD.match(text):
            return _calls([{"name": named[1], "arguments": _json(text[named.end() :])}])
        listed = _json(text)
        return _calls(cast("list[object]", listed)) if isinstance(listed, list) and listed else None


class BareJson:
    """`{"name": …, "parameters": {…}}` and nothing before it but white space and the `;` between calls (Llama 3)."""

    def __init__(self) -> None:
        self._scan = _JsonScan()

    def advance(self, char: str) -> Progress:
        if not self._scan.begun and char != "{":
            return Progress.OPEN if char.isspace() or char == ";" else Progress.BROKEN
        return Progress.DONE if self._scan.advance(char) else Progress.OPEN

    def calls(self, text: str) -> list[WrittenCall] | None:
        return _calls([_json(text[text.find("{") :])])


class _JsonScan:
    """Finds the end of a JSON object or list without reading it: brackets count, except inside of strings."""

    def __init__(self) -> None:
        self.begun = False
        self.in_string = False
        self._escaped = False
        self._depth = 0

    def advance(self, char: str) -> bool:
        """Take the next character; True if it closes the outermost bracket."""
        if self.in_string:
            self.in_string = self._escaped or char != '"'
            self._escaped = not self._escaped and char == "\\"
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.begun = True
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


def _json(text: str) -> object:
    """The value of `text`; None if it is malformed. Models write line breaks into strings, which is let pass."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _calls(values: list[object]) -> list[WrittenCall] | None:
    calls = [_call(value) for value in values]
    return None if None in calls else cast("list[WrittenCall]", calls)


def _call(value: object) -> WrittenCall | None:
    written = cast("Mapping[str, object]", value if isinstance(value, dict) else {})
    name, arguments = written.get("name"), written.get("arguments", written.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, cast("Mapping[str, object]", arguments)
