"""Tool calls: what a request offers, which notation its template teaches, and reading calls out of streamed text."""

from coordinator.text.tool_calls.parsers import tool_call_parser
from coordinator.text.tool_calls.values import ToolCall, ToolCallParser, ToolPiece

__all__ = ["ToolCall", "ToolCallParser", "ToolPiece", "tool_call_parser"]
