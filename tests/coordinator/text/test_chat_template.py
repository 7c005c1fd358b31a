import pytest

from coordinator.text.chat_template import ChatTemplate
from pdserve.core.errors import ErrorReason, PdserveError

MESSAGES = [{"role": "user", "content": "<b>&"}]


def test_special_tokens_json_and_generation_blocks() -> None:
    source = "{{ bos_token }}{% generation %}{{ messages[0] | tojson }}{% endgeneration %}"
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES) == '<s>{"role": "user", "content": "<b>&"}'


def test_a_template_that_is_no_jinja_is_refused_at_load() -> None:
    with pytest.raises(PdserveError, match="line 2") as caught:
        ChatTemplate("x\n{% nonsense %}", {})
    assert caught.value.reason is ErrorReason.UNSUPPORTED


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[0].content.missing.more }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 // 0 }}",
        "{{ undefined_function() }}",
    ],
)
def test_a_template_that_fails_on_the_messages_is_the_requests_fault(source: str) -> None:
    with pytest.raises(PdserveError) as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert (caught.value.reason, caught.value.param) == (ErrorReason.INVALID_ARGUMENT, "messages")
    assert "<b>" not in caught.value.message


def test_variables_are_the_names_that_a_template_reads_from_outside() -> None:
    source = "{% if custom is defined %}{% set tools = custom %}{% endif %}{% if not tools is defined %}"
    source += "{% set tools = none %}{% endif %}{% for message in messages %}{{ message }}{% endfor %}"
    assert {"tools", "custom", "messages"} <= ChatTemplate(source, {}).variables
    assert "tools" not in ChatTemplate("{{ messages }}", {}).variables


def test_without_tools_a_template_sees_none() -> None:
    assert ChatTemplate("{{ tools is none }}{{ tools is defined }}", {}).render(MESSAGES) == "TrueTrue"


def test_json_as_templates_for_transformers_write_it() -> None:
    source = "{{ x | tojson(indent=1) }}{{ x | tojson(separators=(',', ':'), sort_keys=true) }}{{ 'é' | tojson(true) }}"
    variables = {"x": {"b": 1, "a": "é"}}
    expected = '{\n "b": 1,\n "a": "é"\n}{"a":"é","b":1}"\\u00e9"'
    assert ChatTemplate(source, {}).render(MESSAGES, variables) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages[0].content }}{% endfor %}{% endfor %}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_that_never_has_enough_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.text.chat_template.MAX_PROMPT_CHARS", 1000)
    with pytest.raises(PdserveError) as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
