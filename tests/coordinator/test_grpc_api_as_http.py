"""The same request over HTTP and over gRPC is taken, or refused with the same reason, param and message."""

import json
from collections.abc import AsyncIterator, Sequence
from math import inf, nan
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from pdserve.client.channels import aio_channel
from pdserve.client.errors import error_from_rpc
from pdserve.core.errors import PdserveError
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.inference_pb2_grpc import InferenceStub
from tests.support.front_door import front_door
from tests.support.tiny_models import write_tiny_llama

CONTEXT, VOCAB = 64, 300
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{# <tool_call></tool_call> #}"
    "{% for message in messages %}{{ message.role + ':' + message.content + '\n' }}{% endfor %}"
)
Outcome = tuple[object, ...]
Apis = tuple[httpx.AsyncClient, grpc.aio.Channel]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a template that shows tools."""
    path = write_tiny_llama(tmp_path_factory.mktemp("same") / "tiny", context_length=CONTEXT, vocab_size=VOCAB)
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return path


@pytest.fixture
async def apis(model: Path) -> AsyncIterator[Apis]:
    """One coordinator, by both of its doors."""
    async with front_door(model, default_max_tokens=4) as door, aio_channel(door.grpc_address) as channel:
        yield door.http, channel


integers = st.one_of(
    st.integers(0, 8),
    st.sampled_from((-(2**63), -2, -1, 16, 17, 20, 21, 63, 64, 65, 299, 300, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1)),
)
doubles = st.one_of(
    st.sampled_from((0.0, 0.3, 1.0, 1.5, -1.0, 2.5, 100.5, 1e-9, float("nan"), float("inf"))), st.floats()
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(texts, inner, max_size=2)),
    max_leaves=4,
)
functions = st.fixed_dictionaries(
    {"name": st.sampled_from(("f", "g", "", "not a name"))},
    optional={"description": json_values, "parameters": json_values},
)
tools = st.one_of(
    st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": functions}), min_size=1, max_size=2),
    json_values.filter(bool),
)

SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": integers,
    "temperature": doubles,
    "top_k": integers,
    "top_p": doubles,
    "min_p": doubles,
    "presence_penalty": doubles,
    "frequency_penalty": doubles,
    "repetition_penalty": doubles,
    "logit_bias": st.dictionaries(st.integers(-2, 310), doubles, max_size=2),
    "min_tokens": integers,
    "seed": st.sampled_from((0, 1, 2**64 - 1)),
    "stop_token_ids": st.lists(st.integers(-2, 310), max_size=3),
    "ignore_eos": st.booleans(),
    "stop": st.lists(st.one_of(texts, st.just("a" * 1025)), max_size=17),
}
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(("", "tiny", "other")),
    "n": integers,
    "cache_salt": st.sampled_from(("", "s", "s" * 257)),
}
CHAT: dict[str, st.SearchStrategy[Any]] = {
    "tools": tools,
    "tool_choice": st.sampled_from(("auto", "none", "required", "f")),
    "parallel_tool_calls": st.booleans(),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(("a", "messages", "tools")), json_values, max_size=2),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
}
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(("user", "user", "system", "assistant", "tool", "developer", "USER")),
        "content": st.one_of(texts, st.none(), st.just("a b " * 40)),
    },
    optional={
        "name": texts.filter(bool),
        "tool_call_id": texts.filter(bool),
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {
                    "id": texts,
                    "type": st.just("function"),
                    "function": st.fixed_dictionaries(
                        {"name": texts, "arguments": st.sampled_from(("{}", '{"a": 1}', "[]", "{", "1"))}
                    ),
                }
            ),
            min_size=1,
            max_size=2,
        ),
    },
)
prompts = st.one_of(
    texts,
    st.just("a b " * 40),
    st.lists(st.integers(0, 310), max_size=6),
    st.sampled_from((63, 64, 65)).map(lambda length: [7] * length),
)


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """A body for /v1/completions, or with `messages` for /v1/chat/completions, with up to four fields besides."""
    chat = draw(st.booleans())
    extra = CHAT if chat else {"echo": st.booleans(), "logprobs": integers}
    fields = {**SAMPLING, **COMMON, **extra}
    body: dict[str, Any] = {"messages": draw(st.lists(messages, max_size=2))} if chat else {"prompt": draw(prompts)}
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True)):
        body[name] = draw(fields[name])
    return body


HOSTILE_INTEGERS = (-(2**63), -2, -1, 0, 1, 2, 16, 17, 20, 21, 63, 64, 65, 299, 300, 2**31 - 1, 2**31, 2**63 - 1)
HOSTILE_DOUBLES = (-0.0, 1e-9, 0.3, 1.0, 1.1, 2.0, 2.1, -2.0, -2.1, 100.0, 100.5, 1e308, nan, inf, -inf)
EDGES: dict[str, Sequence[Any]] = {
    **dict.fromkeys(("max_tokens", "top_k", "min_tokens", "n", "logprobs"), HOSTILE_INTEGERS),
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty"), HOSTILE_DOUBLES),
    **dict.fromkeys(("frequency_penalty", "repetition_penalty"), HOSTILE_DOUBLES),
    "seed": (0, 2**63, 2**64 - 1),
    "logit_bias": ({0: 100.0}, {299: 100.5}, {300: 0.0}, {-1: 0.0}, {5: nan}, dict.fromkeys(range(300), 1.0)),
    "stop_token_ids": ([299], [300], [-1], [7] * 1025),
    "stop": ([""], ["a" * 1024], ["a" * 1025], ["a"] * 16, ["a"] * 17),
    "ignore_eos": (True, False),
    "echo": (True, False),
    "model": ("tiny", "other", "x" * 500),
    "cache_salt": ("s" * 256, "s" * 257),
}


async def test_each_field_alone_at_its_edges(apis: Apis) -> None:
    http, channel = apis
    for name, values in EDGES.items():
        for value in values:
            body = {"prompt": [7, 8], name: value}
            assert await over_grpc(channel, to_proto(body)) == await over_http(http, body), body


@settings(
    max_examples=200,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(body=bodies())
async def test_taken_or_refused_alike(apis: Apis, body: dict[str, Any]) -> None:
    http, channel = apis
    outcome = await over_http(http, body)
    event(str(outcome[:2]))
    assert await over_grpc(channel, to_proto(body)) == outcome


async def over_http(http: httpx.AsyncClient, body: dict[str, Any]) -> Outcome:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = await http.post(path, content=json.dumps(body))
    answer = response.json()
    if response.status_code != 200:
        error = answer["error"]
        return (error["code"], error["param"] or "", error["message"])
    return ("taken", answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])


async def over_grpc(channel: grpc.aio.Channel, request: pb.GenerateRequest) -> Outcome:
    prompt_tokens = completion_tokens = 0
    try:
        async for answer in InferenceStub(channel).Generate(request, timeout=30):
            prompt_tokens = answer.started.num_prompt_tokens or prompt_tokens
            completion_tokens += answer.finished.usage.completion_tokens
    except grpc.aio.AioRpcError as error:
        found: PdserveError = error_from_rpc(error)
        return (found.reason.value, found.param, found.message)
    return ("taken", prompt_tokens, completion_tokens)


def to_proto(body: dict[str, Any]) -> pb.GenerateRequest:
    """The same request, field by field."""
    sampling = pb.SamplingOptions(**{name: body[name] for name in (*SAMPLING, "logprobs") if name in body})
    request = pb.GenerateRequest(sampling=sampling, **{name: body[name] for name in (*COMMON, "echo") if name in body})
    if "messages" in body:
        request.chat.CopyFrom(chat_to_proto(body))
    elif isinstance(body["prompt"], str):
        request.text = body["prompt"]
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=body["prompt"]))
    return request


def chat_to_proto(body: dict[str, Any]) -> pb.ChatPrompt:
    names = {"tools": "tools_json", "chat_template_kwargs": "template_variables_json"}
    fields = {
        names.get(name, name): json.dumps(body[name]) if name in names else body[name] for name in CHAT if name in body
    }
    return pb.ChatPrompt(messages=[message_to_proto(message) for message in body["messages"]], **fields)


def message_to_proto(message: dict[str, Any]) -> pb.ChatMessage:
    calls = [
        pb.ToolCall(id=call["id"], name=call["function"]["name"], arguments_json=call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return pb.ChatMessage(**{**message, "tool_calls": calls})
