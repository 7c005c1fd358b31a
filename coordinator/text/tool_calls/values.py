"""What a tool call is, and what reads calls out of a model's text. Knows no notation."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `arguments` is JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolPiece:
    """What may be shown now: text outside of calls, and calls that are complete."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class ToolCallParser(Protocol):
    """Reads one choice's text, in pieces of any size; the result does not depend on how it is cut.

    `visible_tokens` are special tokens, elsewhere not shown, whose vocabulary text is part of the notation.
    """

    @property
    def visible_tokens(self) -> frozenset[int]: ...

    def push(self, text: str) -> ToolPiece: ...

    def flush(self) -> ToolPiece:
        """No more text comes: what was held back, as text if it made no call."""
        ...
