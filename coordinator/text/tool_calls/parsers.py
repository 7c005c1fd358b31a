"""Which parser reads a request's answers, if any. Knows no notation."""

from coordinator.generation.inputs import ChatPrompt, Prompt
from coordinator.generation.served_model import TextModel
from coordinator.text.tool_calls.call_stream import CallStream
from coordinator.text.tool_calls.offer import tool_offer
from coordinator.text.tool_calls.values import ToolCallParser


def tool_call_parser(prompt: Prompt, model: TextModel) -> ToolCallParser | None:
    """One object a choice; None where the request offers no tools.

    Raises:
        PdserveError: as `tool_offer`.
    """
    offer = tool_offer(prompt, model) if isinstance(prompt, ChatPrompt) else None
    if offer is None:
        return None
    ids = (model.tokenizer.special_token_id(text) for text in offer.notation.special_tokens)
    visible = frozenset(token_id for token_id in ids if token_id is not None)
    return CallStream(offer.notation, frozenset(offer.tools), offer.parallel, visible)
