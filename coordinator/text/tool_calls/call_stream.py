"""Telling calls from text as an answer streams, whatever the notation. Knows no tokens."""

import json
import secrets
import string
from collections.abc import Mapping

from coordinator.text.stop_strings import StopMatcher
from coordinator.text.tool_calls.call_bodies import Progress, WrittenCall
from coordinator.text.tool_calls.notations import Notation
from coordinator.text.tool_calls.values import ToolCall, ToolPiece

_ID_CHARS = string.ascii_letters + string.digits


class CallStream:
    """A `ToolCallParser`. It goes character by character, so that how the text is cut cannot matter.

    Held back is what may be the start of an opening, white space (which next to a call is not content), and a body
    until it is complete. A body that makes no call of a function in `names` comes out as it was written.
    """

    def __init__(
        self, notation: Notation, names: frozenset[str], parallel: bool, visible_tokens: frozenset[int] = frozenset()
    ) -> None:
        self.visible_tokens = visible_tokens
        self._notation = notation
        self._names = names
        self._shown = _Shown(notation.num_id_chars, notation.id_prefix, parallel)
        self._opening = StopMatcher([notation.opening] if notation.opening else [])
        self._body = None if notation.opening else notation.make_body()
        self._body_chars: list[str] = []

    def push(self, text: str) -> ToolPiece:
        for char in text:
            self._advance(char)
        return self._shown.take()

    def flush(self) -> ToolPiece:
        if self._body is not None:
            self._end_body()
        self._shown.text(self._opening.flush())
        self._shown.end()
        return self._shown.take()

    def _advance(self, char: str) -> None:
        if self._body is None:
            self._shown.text(self._opening.push(char))
            if self._opening.matched:
                self._begin_body()
            return
        self._body_chars.append(char)
        match self._body.advance(char):
            case Progress.OPEN:
                pass
            case Progress.DONE:
                self._end_body()
            case Progress.BROKEN:
                self._give_up()

    def _begin_body(self) -> None:
        self._body, self._body_chars = self._notation.make_body(), []

    def _end_body(self) -> None:
        assert self._body is not None
        calls = self._body.calls("".join(self._body_chars))
        written = [self._written(call) for call in calls or ()]
        if not written or None in written:
            self._give_up()
            return
        for name, arguments in filter(None, written):
            self._shown.call(name, arguments)
        self._look_for_opening()
        if not self._notation.opening:
            self._begin_body()

    def _give_up(self) -> None:
        """Without an opening to look for, the rest of the answer is text."""
        self._shown.text(self._notation.opening + "".join(self._body_chars))
        self._look_for_opening()

    def _look_for_opening(self) -> None:
        self._body, self._body_chars = None, []
        self._opening = StopMatcher([self._notation.opening] if self._notation.opening else [])

    def _written(self, call: WrittenCall) -> tuple[str, str] | None:
        """Name and arguments as JSON text, or None for what cannot be a call of an offered function."""
        name, arguments = call
        try:
            return (name, _json_text(arguments)) if name in self._names else None
        except (ValueError, RecursionError):
            return None


class _Shown:
    """What may be shown, in order. Without `parallel` only the first call is."""

    def __init__(self, num_id_chars: int, id_prefix: str, parallel: bool) -> None:
        self._num_id_chars = num_id_chars
        self._id_prefix = id_prefix
        self._parallel = parallel
        self._text: list[str] = []
        self._calls: list[ToolCall] = []
        self._space: list[str] = []
        self._after_call = False
        self._num_calls = 0

    def text(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        shown = text.rstrip()
        if shown:
            self._text += (*self._space, shown)
            self._space.clear()
            self._after_call = False
        self._space.append(text[len(shown) :])

    def call(self, name: str, arguments: str) -> None:
        self._space.clear()
        self._after_call = True
        self._num_calls += 1
        if self._parallel or self._num_calls == 1:
            random = "".join(secrets.choice(_ID_CHARS) for _ in range(self._num_id_chars))
            self._calls.append(ToolCall(self._id_prefix + random, name, arguments))

    def end(self) -> None:
        """White space held back is content after all."""
        self._text += self._space
        self._space.clear()

    def take(self) -> ToolPiece:
        piece = ToolPiece("".join(self._text), tuple(self._calls))
        self._text.clear()
        self._calls.clear()
        return piece


def _json_text(arguments: Mapping[str, object]) -> str:
    """Raises ValueError for NaN and infinities, which Python's reader lets pass."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate; it can only stay an escape
        return json.dumps(arguments, allow_nan=False)
    return text
