from dataclasses import replace
from typing import Any

import pytest

from coordinator.generation.inputs import ChatPrompt, TextPrompt
from coordinator.text.prompts import render_prompt
from coordinator.text.tool_calls import tool_call_parser
from coordinator.text.tool_calls.notations import find_notation
from coordinator.text.tool_calls.offer import MAX_TOOLS, tool_offer
from pdserve.core.errors import ErrorReason, PdserveError
from tests.coordinator.text.tool_calls import templates
from tests.coordinator.text_fakes import CHATML, text_model

MODEL = text_model(template=templates.HERMES)
USER = {"role": "user", "content": "hi"}


def tool(name: str = "weather", **function: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def prompt(**fields: Any) -> ChatPrompt:
    return replace(ChatPrompt([USER], tools=[tool()]), **fields)


def refusal(wanted: ChatPrompt, template: str = templates.HERMES) -> PdserveError:
    with pytest.raises(PdserveError) as caught:
        render_prompt(wanted, text_model(template=template))
    return caught.value


@pytest.mark.parametrize(
    ("template", "name"),
    [(templates.HERMES, "hermes"), (templates.MISTRAL, "mistral"), (templates.LLAMA3_JSON, "llama3-json")],
)
def test_the_notation_is_told_by_the_template(template: str, name: str) -> None:
    offer = tool_offer(prompt(), text_model(template=template))
    assert offer is not None
    assert offer.notation.name == name
    assert "weather" in str(render_prompt(prompt(), text_model(template=template))) or name == "mistral"


@pytest.mark.parametrize("template", [CHATML, templates.XML_CALLS, templates.UNKNOWN_CALLS])
def test_no_notation_is_taken_for_another(template: str) -> None:
    assert find_notation(template) is None
    error = refusal(prompt(), template)
    assert (error.reason, error.param) == (ErrorReason.UNSUPPORTED, "tools")
    assert "describe the" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool(), tool("")]}, "tools[1].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(description=1)]}, "tools[0].function.description"),
        ({"tools": [tool(parameters="{}")]}, "tools[0].function.parameters"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
@pytest.mark.parametrize("template", [templates.HERMES, CHATML])
def test_malformed_tools_are_refused_by_name(fields: dict[str, Any], param: str, template: str) -> None:
    error = refusal(prompt(**fields), template)
    assert (error.reason, error.param) == (ErrorReason.INVALID_ARGUMENT, param)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_cannot_be_forced(choice: object) -> None:
    error = refusal(prompt(tool_choice=choice))
    assert (error.reason, error.param) == (ErrorReason.UNSUPPORTED, "tool_choice")
    assert '"auto"' in error.message


@pytest.mark.parametrize("fields", [{"tools": None}, {"tools": []}, {"tool_choice": "none"}])
def test_nothing_is_offered_and_nothing_parsed(fields: dict[str, Any]) -> None:
    plain = render_prompt(ChatPrompt([USER]), MODEL)
    assert render_prompt(prompt(**fields), MODEL) == plain
    assert tool_call_parser(prompt(**fields), MODEL) is None
    assert render_prompt(prompt(**fields), text_model()) == "<user>hi\n<assistant>"


def test_text_prompts_have_no_parser() -> None:
    assert tool_call_parser(TextPrompt("x"), MODEL) is None


def test_each_choice_has_its_own_parser_of_the_offered_names() -> None:
    first, second = tool_call_parser(prompt(), MODEL), tool_call_parser(prompt(), MODEL)
    assert first is not None
    assert second is not None
    first.push("<tool_call>")
    assert second.push('{"name": "weather"}').text == '{"name": "weather"}'
    (call,) = first.push('{"name": "weather"}</tool_call>').calls
    assert (call.name, call.arguments) == ("weather", "{}")


def test_a_description_may_have_everything_that_json_schema_has() -> None:
    schema = {"type": "object", "properties": {"é": {"enum": [None, 1.5, "<b>"]}}, "additionalProperties": False}
    rendered = str(render_prompt(prompt(tools=[tool(parameters=schema, strict=True)]), MODEL))
    assert '{"enum": [null, 1.5, "<b>"]}' in rendered
