from dataclasses import replace

import pytest

from coordinator.generation.inputs import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from coordinator.text.chat_template import ChatTemplate
from coordinator.text.prompts import encode_prompt, num_chars, render_prompt
from pdserve.core.errors import ErrorReason, PdserveError
from tests.coordinator.text_fakes import EOS, byte_tokenizer, text_model

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


@pytest.mark.parametrize("prompt", [TextPrompt("a<image>"), ChatPrompt([{"role": "user", "content": "<image>"}])])
def test_a_token_without_an_embedding_is_refused_by_its_text(prompt: TextPrompt | ChatPrompt) -> None:
    """Gemma 3's small models have one more token than rows."""
    model = text_model(byte_tokenizer(special=["<image>"]))
    model = replace(model, info=replace(model.info, vocab_size=model.info.vocab_size - 1))
    with pytest.raises(PdserveError, match="'<image>'") as caught:
        encode_prompt(prompt, render_prompt(prompt, model), model)
    assert (caught.value.reason, caught.value.param) == (ErrorReason.INVALID_ARGUMENT, prompt.param)


THINKING = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content | trim }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}[no]{% endif %}{% endif %}"
)


def rendered(*messages: object, **fields: object) -> str:
    model = replace(text_model(), chat_template=ChatTemplate(THINKING, {"bos_token": "<s>"}))
    return str(render_prompt(ChatPrompt(messages, **fields), model))  # type: ignore[arg-type]


def refused(*messages: object, **fields: object) -> PdserveError:
    with pytest.raises(PdserveError) as caught:
        rendered(*messages, **fields)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    return caught.value


def test_variables_reach_the_template() -> None:
    assert rendered(user("x")) == "<s>[user]x[end][assistant]"
    assert rendered(user("x"), template_variables={"enable_thinking": False}) == "<s>[user]x[end][assistant][no]"
    assert rendered(user("x"), template_variables={"self": 1, "a b": [], "items": {}}) == rendered(user("x"))


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "add_generation_prompt", "raise_exception"])
def test_variables_cannot_hide_what_the_template_gets(name: str) -> None:
    assert refused(user("x"), template_variables={name: "y"}).param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("variables", ["{}", [], 1])
def test_variables_are_an_object(variables: object) -> None:
    assert refused(user("x"), template_variables=variables).param == "chat_template_kwargs"


def test_without_a_generation_prompt() -> None:
    assert rendered(user("x"), add_generation_prompt=False) == "<s>[user]x[end]"
    assert refused(user("x"), add_generation_prompt="no").param == "add_generation_prompt"


@pytest.mark.parametrize(
    ("content", "end"), [("The answer", "The answer"), ("x", "x"), (" It is ", "It is"), ("a [end] b", "a [end] b")]
)
def test_the_final_message_goes_on_where_it_ends(content: str, end: str) -> None:
    messages = [user("x"), {"role": "assistant", "content": content}]
    for more in ({}, {"add_generation_prompt": False}):
        assert rendered(*messages, continue_final_message=True, **more) == f"<s>[user]x[end][assistant]{end}"


def test_what_cannot_be_continued_is_refused() -> None:
    assert refused(user("x"), continue_final_message=True, add_generation_prompt=True).param == "continue_final_message"
    assert refused(user("x"), user(" "), continue_final_message=True).param == "messages[-1].content"
    assert refused(user("x"), continue_final_message=1).param == "continue_final_message"


def test_text_that_spells_a_special_token_becomes_that_token() -> None:
    for prompt in (TextPrompt("a<eos>"), ChatPrompt([user("a<eos>")])):
        ids = encode_prompt(prompt, render_prompt(prompt, MODEL), MODEL)
        assert EOS in ids


@pytest.mark.parametrize(
    "prompt",
    [
        TextPrompt("x" * 1000),
        TokenPrompt([1] * 1000),
        ChatPrompt([user("x" * 1000)]),
        ChatPrompt([7, user(None), {"content": 1}, user([{"type": "text", "text": "x" * 1000}, 3, {}])]),
        ChatPrompt([{"role": "assistant", "tool_calls": [{"function": {"arguments": "x" * 1000}}]}]),
        ChatPrompt([user("x")], tools=[{"function": {"description": "x" * 1000}}]),
        ChatPrompt([user("x")], template_variables={"x": ["y"] * 1000}),
    ],
)
def test_the_size_of_a_prompt_is_found_without_checking_it(prompt: Prompt) -> None:
    assert 1000 <= num_chars(prompt, enough=10_000) < 2100
    assert num_chars(prompt, enough=10) >= 10


def test_a_small_chat_is_small() -> None:
    assert num_chars(ChatPrompt([user("hello")]), enough=10_000) < 30


def test_a_long_final_message_that_the_template_changes_is_refused_at_once() -> None:
    """Looked for with `str.rfind`, it would hold the interpreter lock for hours."""
    without_thoughts = ChatTemplate("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}", {})
    model = replace(text_model(), chat_template=without_thoughts)
    messages = [user("a" * 3_000_000), user("ab</think>" + "a" * 1_000_000)]
    with pytest.raises(PdserveError, match="does not show it as it is"):
        render_prompt(ChatPrompt(messages, continue_final_message=True), model)
