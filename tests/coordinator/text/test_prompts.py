import pytest

from coordinator.generation.inputs import ChatPrompt, TextPrompt, TokenPrompt
from coordinator.text.prompts import encode_prompt, render_prompt
from pdserve.core.errors import ErrorReason, PdserveError
from tests.coordinator.text_fakes import text_model

MODEL = text_model()
VOCAB = MODEL.info.vocab_size


def chat(*messages: object) -> str | list[int]:
    return render_prompt(ChatPrompt(messages), MODEL)


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("ids", "param"),
    [
        ([-1], "prompt[0]"),
        ([VOCAB], "prompt[0]"),
        ([1, 2**63], "prompt[1]"),
        ([1, 10**5000], "prompt[1]"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        ([1, "1"], "prompt[1]"),
        ([1, None], "prompt[1]"),
        ([1, [2]], "prompt[1]"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_index(ids: list[object], param: str) -> None:
    with pytest.raises(PdserveError) as caught:
        render_prompt(TokenPrompt(ids), MODEL)
    assert (caught.value.reason, caught.value.param) == (ErrorReason.INVALID_ARGUMENT, param)
    assert len(caught.value.message) < 200


def test_the_last_row_of_the_embedding_is_allowed() -> None:
    assert render_prompt(TokenPrompt([VOCAB - 1]), MODEL) == [VOCAB - 1]


def test_lone_surrogates_become_replacement_characters() -> None:
    assert render_prompt(TextPrompt("a\ud83db"), MODEL) == "a\ufffdb"
    rendered = chat(user("a\udc00"))
    assert isinstance(rendered, str)
    assert "a\ufffd" in rendered


def test_null_content_is_empty_content() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    rendered = chat(user("x"), turn, user("y"))
    assert rendered == chat(user("x"), {**turn, "content": ""}, user("y"))
    assert "None" not in str(rendered)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    assert chat(user(parts)) == chat(user("hello"))


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ((), "messages"),
        ((user([{"type": "image_url", "image_url": {}}]),), "messages[0].content[0]"),
        ((user([[{"type": "text", "text": "x"}]]),), "messages[0].content[0]"),
        ((user([{"type": "text", "text": None}]),), "messages[0].content[0]"),
        ((user(3),), "messages[0].content"),
        ((user("x"), {"role": "wizard", "content": ""}), "messages[1].role"),
        (({"content": ""},), "messages[0].role"),
        (("hello",), "messages[0]"),
    ],
)
def test_malformed_messages_are_refused_by_name(messages: tuple[object, ...], param: str) -> None:
    with pytest.raises(PdserveError) as caught:
        chat(*messages)
    assert (caught.value.reason, caught.value.param) == (ErrorReason.INVALID_ARGUMENT, param)


def test_the_templates_own_refusal_reaches_the_client() -> None:
    with pytest.raises(PdserveError, match="System message must be first") as caught:
        chat(user("x"), {"role": "system", "content": "y"})
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


def test_without_a_template_chat_is_refused_and_text_is_not() -> None:
    model = text_model(template=None)
    with pytest.raises(PdserveError, match="no chat template"):
        render_prompt(ChatPrompt([user("x")]), model)
    assert encode_prompt(TextPrompt("ab"), "ab", model) == [97, 98]
