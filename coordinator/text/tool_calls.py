"""Tool calls in a model's output: which notation a template teaches, and reading it as it streams. Knows no HTTP."""

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
    """Reads one choice's text, in pieces of any size; the result does not depend on how it is cut."""

    def push(self, text: str) -> ToolPiece: ...

    def flush(self) -> ToolPiece:
        """No more text comes: what was held back, as text if it made no call."""
        ...
