"""/v1/chat/completions as the openai client asks for it: each feature, and the answer of the alphabet model."""

import json
from functools import partial
from typing import Any

from tests.clients.alphabet_model import ALPHABET, TOOL_ARGUMENTS, TOOL_NAME, token_id
from tests.clients.completion_features import ALMOST_EVEN, BEST_LOGPROB, MODEL, SECOND_LOGPROB, differing_choices, near
from tests.clients.feature import Feature
from tests.clients.outcomes import Outcome

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
_CALL = {"id": "call_1", "type": "function", "function": {"name": TOOL_NAME, "arguments": '{"city": "Paris"}'}}
TOOL_HISTORY = [
    *HELLO,
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "developer", "content": "be kind"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "abc"},
    {"role": "user", "content": "more"},
]


def _content_logprobs(num_top: int, outcome: Outcome) -> None:
    entries = outcome.choices[0].logprobs["content"]
    assert [entry["token"] for entry in entries] == list("abc")
    assert [bytes(entry["bytes"]).decode() for entry in entries] == list("abc")
    assert [entry["logprob"] for entry in entries] == [near(BEST_LOGPROB)] * 3
    for entry, tokens in zip(entries, ("ab", "bc", "cd"), strict=True):
        top = entry["top_logprobs"]
        assert [(other["token"], other["logprob"]) for other in top] == list(
            zip(tokens, (near(BEST_LOGPROB), near(SECOND_LOGPROB)), strict=True)
        )[:num_top]


def _one_tool_call(outcome: Outcome) -> None:
    (choice,) = outcome.choices
    ((name, arguments),) = choice.tool_calls
    assert (name, json.loads(arguments)) == (TOOL_NAME, TOOL_ARGUMENTS)
    assert not choice.text.strip()


def _no_tool_call(outcome: Outcome) -> None:
    assert not outcome.choices[0].tool_calls


def chat(name: str, messages: Any = HELLO, **rest: Any) -> Feature:
    """`rest`: fields of Feature, then the request's own."""
    expected = {key: rest.pop(key) for key in list(rest) if key in Feature.__dataclass_fields__}
    arguments = {"model": MODEL, "messages": messages, "temperature": 0, "max_completion_tokens": 50, **rest}
    return Feature(name, "chat", arguments, **expected)


CHAT_FEATURES = (
    chat("`messages`: system, developer, user, assistant", CONVERSATION, texts=(ALPHABET,), finish_reasons=("stop",)),
    chat(
        "`messages`: content parts",
        [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}],
        texts=(ALPHABET,),
    ),
    chat(
        "`messages`: an image part",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        refused=("messages[0].content[0]", "invalid_argument"),
    ),
    chat("`messages`: `name`", [{"role": "user", "name": "ann", "content": "hello"}], texts=(ALPHABET,)),
    chat(
        "`messages`: an unknown role",
        [{"role": "critic", "content": "hello"}],
        refused=("messages[0].role", "invalid_argument"),
    ),
    chat("`max_completion_tokens`", max_completion_tokens=4, texts=("abcd",), finish_reasons=("length",)),
    chat("`max_tokens`", max_completion_tokens=None, max_tokens=4, texts=("abcd",), finish_reasons=("length",)),
    chat("`n`", n=2, texts=(ALPHABET,) * 2),
    chat("`n`, sampled", n=3, temperature=ALMOST_EVEN, seed=1, max_completion_tokens=8, check=differing_choices),
    chat("`stop`", stop=["ef"], texts=("abcd",), finish_reasons=("stop",)),
    chat("`seed`, `top_p`", temperature=ALMOST_EVEN, seed=2, top_p=0.001, extra_body={"top_k": 9}, texts=(ALPHABET,)),
    chat("`presence_penalty`, `frequency_penalty`", presence_penalty=1, frequency_penalty=1, texts=(ALPHABET,)),
    chat("`logit_bias`", logit_bias={str(token_id("q")): 100}, max_completion_tokens=3, texts=("qqq",)),
    chat("`logprobs`", max_completion_tokens=3, logprobs=True, check=partial(_content_logprobs, 0)),
    chat("`top_logprobs`", max_completion_tokens=3, logprobs=True, top_logprobs=2, check=partial(_content_logprobs, 2)),
    chat("`top_logprobs` without `logprobs`", top_logprobs=2, refused=("top_logprobs", "invalid_argument")),
    chat("`tools`", tools=TOOLS, finish_reasons=("tool_calls",), check=_one_tool_call),
    chat(
        "`parallel_tool_calls`: false",
        tools=TOOLS,
        parallel_tool_calls=False,
        finish_reasons=("tool_calls",),
        check=_one_tool_call,
    ),
    chat("`tool_choice`: auto", tools=TOOLS, tool_choice="auto", finish_reasons=("tool_calls",), check=_one_tool_call),
    chat("`tool_choice`: none", tools=TOOLS, tool_choice="none", texts=(ALPHABET,), check=_no_tool_call),
    chat("`tool_choice`: required", tools=TOOLS, tool_choice="required", refused=("tool_choice", "unsupported")),
    chat(
        "`tool_choice`: a named function",
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": TOOL_NAME}},
        refused=("tool_choice", "unsupported"),
    ),
    chat("tool results in the history", TOOL_HISTORY, tools=TOOLS, texts=(ALPHABET,), check=_no_tool_call),
    chat(
        "`functions`",
        functions=[TOOLS[0]["function"]],
        refused=("functions", "unsupported"),
    ),
    chat("`response_format`: text", response_format={"type": "text"}, texts=(ALPHABET,)),
    chat(
        "`response_format`: json_object",
        response_format={"type": "json_object"},
        refused=("response_format", "unsupported"),
    ),
    chat(
        "`response_format`: json_schema",
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        refused=("response_format", "unsupported"),
    ),
    chat(
        "`modalities`: audio",
        modalities=["text", "audio"],
        refused=("modalities", "unsupported"),
    ),
    chat("`user`, `metadata`, `store`", user="somebody", metadata={"a": "b"}, store=False, texts=(ALPHABET,)),
    chat("`extra_body`: `top_k`", temperature=ALMOST_EVEN, extra_body={"top_k": 1}, texts=(ALPHABET,)),
    chat(
        "`extra_body`: `ignore_eos`",
        max_completion_tokens=30,
        extra_body={"ignore_eos": True},
        texts=(ALPHABET + "abc",),
        finish_reasons=("length",),
    ),
    chat(
        "`extra_body`: `add_generation_prompt`: false",
        extra_body={"add_generation_prompt": False},
        texts=(ALPHABET,),
    ),
    chat(
        "`extra_body`: `continue_final_message`",
        [*HELLO, {"role": "assistant", "content": "abc"}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
        texts=(ALPHABET[3:],),
    ),
    chat(
        "`extra_body`: `chat_template_kwargs`",
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        texts=(ALPHABET,),
    ),
    chat("`extra_body`: an unknown field", extra_body={"no_such_field": 1}, texts=(ALPHABET,)),
)
