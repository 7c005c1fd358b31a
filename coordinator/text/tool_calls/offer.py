"""The tools that a request offers: checked, and only to a model whose template shows them in a notation we read."""

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.generation.inputs import ChatPrompt
from coordinator.generation.served_model import TextModel
from coordinator.text.json_types import json_list, json_object, json_type
from coordinator.text.tool_calls.call_bodies import NAME
from coordinator.text.tool_calls.notations import NOTATIONS, Notation, find_notation
from pdserve.core.errors import ErrorReason, PdserveError, invalid

MAX_TOOLS = 128


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """`tools` by function name, as the client described them. Without `parallel` one call an answer is wanted."""

    tools: Mapping[str, Mapping[str, object]]
    notation: Notation
    parallel: bool


def tool_offer(prompt: ChatPrompt, model: TextModel) -> ToolOffer | None:
    """None where nothing is offered: there are no tools, or `tool_choice` is "none".

    Raises:
        PdserveError: INVALID_ARGUMENT or UNSUPPORTED, naming the field at fault.
    """
    tools = _check_tools(prompt.tools)
    parallel = prompt.parallel_tool_calls
    if parallel is not None and not isinstance(parallel, bool):
        raise invalid("parallel_tool_calls must be true or false", "parallel_tool_calls")
    if not _wanted(prompt.tool_choice, tools):
        return None
    return ToolOffer(tools, _notation(model), parallel is not False)


def _wanted(choice: object, tools: Mapping[str, object]) -> bool:
    if choice in (None, "auto", "none"):
        return bool(tools) and choice != "none"
    if choice != "required" and not isinstance(choice, Mapping):
        raise invalid('tool_choice must be "auto" or "none"', "tool_choice")
    message = (
        'tool_choice can only be "auto" or "none": this version can\'t force a call; use "auto" and ask for the '
        "call in a message"
    )
    raise PdserveError(ErrorReason.UNSUPPORTED, message, param="tool_choice")


def _notation(model: TextModel) -> Notation:
    name, template = model.info.name, model.chat_template
    if template is None or "tools" not in template.variables:
        message = f"the chat template of model {name!r} renders no tools; use a model with tools, or describe them in a"
        raise PdserveError(ErrorReason.UNSUPPORTED, f"{message} message and read the answer yourself", param="tools")
    notation = find_notation(template.source)
    if notation is None:
        known = ", ".join(notation.name for notation in NOTATIONS)
        message = f"the tool calls of model {name!r} are in a notation not known here (known: {known}); describe the"
        raise PdserveError(ErrorReason.UNSUPPORTED, f"{message} tools in a message instead", param="tools")
    return notation


def _check_tools(raw: object) -> dict[str, Mapping[str, object]]:
    tools: dict[str, Mapping[str, object]] = {}
    for index, item in enumerate(json_list(raw, MAX_TOOLS, "tools")):
        param = f"tools[{index}]"
        tool = json_object(item, param)
        if tool.get("type") != "function":
            raise invalid(f'{param}.type must be "function"', f"{param}.type")
        name = _check_function(tool.get("function"), f"{param}.function")
        if name in tools:
            raise invalid(f"{param}.function.name repeats that of an earlier tool", f"{param}.function.name")
        tools[name] = tool
    return tools


def _check_function(raw: object, param: str) -> str:
    function = json_object(raw, param)
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(f"{param}.name must be 1 to 64 of the characters A–Z, a–z, 0–9, _ and -", f"{param}.name")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{param}.description must be text; it is a {json_type(description)}", f"{param}.description")
    if function.get("parameters") is not None:
        json_object(function["parameters"], f"{param}.parameters")
    return name
