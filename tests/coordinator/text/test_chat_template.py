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
