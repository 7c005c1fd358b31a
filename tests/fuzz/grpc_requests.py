"""What a careless or hostile client may send to the Inference service."""

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.vendor.pretty import RepresentationPrinter

from pdserve.v1 import inference_pb2 as pb

GENERATE = "/pdserve.v1.Inference/Generate"
LIST_MODELS = "/pdserve.v1.Inference/ListModels"


@dataclass(frozen=True, repr=False)
class Case:
    """Bytes for a method. The client hangs up after `num_messages` answers, if that is not None."""

    method: str
    raw: bytes
    timeout_s: float | None = None
    num_messages: int | None = None

    def __repr__(self) -> str:
        cut = f"{self.raw[:200]!r} of {len(self.raw)} bytes"
        return f"Case({self.method}, {cut}, timeout_s={self.timeout_s}, num_messages={self.num_messages})"

    def _repr_pretty_(self, printer: RepresentationPrinter, _cycle: bool) -> None:
        """Hypothesis would print all of the bytes."""
        printer.text(repr(self))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Mostly requests that say something; now and then bytes that don't."""
    kind = draw(
        st.sampled_from(("request", "request", "request", "hurried", "leaving", "damaged", "garbage", "models"))
    )
    match kind:
        case "request":
            return Case(GENERATE, draw(requests()).SerializeToString())
        case "hurried":
            return Case(GENERATE, draw(requests()).SerializeToString(), timeout_s=draw(_TIMEOUTS))
        case "leaving":
            return Case(GENERATE, draw(requests()).SerializeToString(), num_messages=draw(st.integers(1, 3)))
        case "damaged":
            return Case(GENERATE, draw(damaged_requests()))
        case "garbage":
            return Case(GENERATE, draw(st.binary(max_size=64)))
        case _:
            return Case(LIST_MODELS, draw(st.one_of(st.just(b""), st.binary(max_size=16))))


@st.composite
def requests(draw: st.DrawFn) -> pb.GenerateRequest:
    """Every field, each valid or not; most requests have few that are not, so that some are served."""
    request = pb.GenerateRequest(sampling=draw(sampling_options()))
    kind = draw(st.sampled_from(("text", "token_ids", "token_ids", "chat", "")))
    if kind == "text":
        request.text = draw(_TEXTS)
    elif kind == "token_ids":
        request.token_ids.CopyFrom(pb.TokenIds(ids=draw(_PROMPT_IDS)))
    elif kind == "chat":
        request.chat.CopyFrom(draw(chats()))
    for name, values in draw(_chosen(_REQUEST_FIELDS)).items():
        setattr(request, name, draw(values))
    return request


@st.composite
def sampling_options(draw: st.DrawFn) -> pb.SamplingOptions:
    fields = {name: draw(values) for name, values in draw(_chosen(_SAMPLING_FIELDS)).items()}
    return pb.SamplingOptions(**fields)


@st.composite
def chats(draw: st.DrawFn) -> pb.ChatPrompt:
    chat = pb.ChatPrompt(messages=draw(st.lists(_MESSAGES, max_size=3)))
    for name, values in draw(_chosen(_CHAT_FIELDS)).items():
        setattr(chat, name, draw(values))
    return chat


def _chosen(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, st.SearchStrategy[Any]]]:
    names = st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)
    return names.map(lambda chosen: {name: fields[name] for name in chosen})


@st.composite
def damaged_requests(draw: st.DrawFn) -> bytes:
    """Cut, with a byte changed, with fields nobody knows, or with text that is no UTF-8."""
    raw = draw(requests()).SerializeToString()
    at = draw(st.integers(0, max(len(raw) - 1, 0)))
    match draw(st.sampled_from(("cut", "changed", "unknown fields", "surrogate"))):
        case "cut":
            return raw[:at]
        case "changed":
            return raw[:at] + bytes([draw(st.integers(0, 255))]) + raw[at + 1 :]
        case "unknown fields":
            return raw + b"\xfa\x3f\x03abc\xf8\x3f\x05"
        case _:
            return raw + b"\x12\x03" + "\ud800".encode(errors="surrogatepass")


_TIMEOUTS = st.sampled_from((0.001, 0.01, 0.05, 30.0))

_INT64S = st.one_of(
    st.integers(0, 4),
    st.integers(0, 4),
    st.sampled_from((-1, 20, 21, 127, 128, 299, 300, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, -(2**63))),
    st.integers(-(2**63), 2**63 - 1),
)
_UINT64S = st.one_of(st.integers(0, 3), st.sampled_from((2**32, 2**63, 2**64 - 1)), st.integers(0, 2**64 - 1))
_DOUBLES = st.one_of(
    st.sampled_from((0.0, 0.5, 1.0)),
    st.sampled_from((0.0, 0.5, 1.0)),
    st.sampled_from((-0.0, 1e-6, 1e-300, 5e-324, 2.0, 100.0, 1e308, float("nan"), float("inf"), -float("inf"))),
    st.floats(),
)
_CHARS = st.characters(exclude_categories=["Cs"])
_SHORT_TEXTS = st.text(_CHARS, max_size=12)
_TEXTS = st.one_of(
    st.text(_CHARS, min_size=1, max_size=30),
    _SHORT_TEXTS,
    st.sampled_from(
        ("\0", "<|im_end|>", "<|endoftext|>", "{{ 7 * 7 }}", "{% raw %}", "\u202e", "\U0010ffff", "é" * 40)
    ),
    st.sampled_from((10_000, 1_000_000, 4 * 1024 * 1024)).map(lambda length: "a b" * (length // 3)),
)
_PROMPT_IDS = st.one_of(
    st.lists(st.integers(0, 299), min_size=1, max_size=20),
    st.lists(st.integers(0, 299), min_size=1, max_size=20),
    st.lists(st.integers(0, 2**32 - 1), max_size=5),
    st.sampled_from((126, 127, 128, 200_000)).map(lambda length: [7] * length),
)

_SAMPLING_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": _INT64S,
    "temperature": _DOUBLES,
    "top_k": _INT64S,
    "top_p": _DOUBLES,
    "min_p": _DOUBLES,
    "presence_penalty": _DOUBLES,
    "frequency_penalty": _DOUBLES,
    "repetition_penalty": _DOUBLES,
    "logit_bias": st.dictionaries(st.one_of(st.integers(0, 299), _INT64S), _DOUBLES, max_size=3),
    "min_tokens": _INT64S,
    "seed": _UINT64S,
    "stop_token_ids": st.lists(st.one_of(st.integers(0, 299), _INT64S), max_size=3),
    "ignore_eos": st.booleans(),
    "stop": st.lists(st.one_of(_SHORT_TEXTS, st.just("a" * 1025)), max_size=18),
    "logprobs": _INT64S,
}

_REQUEST_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(("", "tiny", "other", "a" * 5000)),
    "n": st.one_of(st.integers(1, 3), _INT64S),
    "echo": st.booleans(),
    "request_label": _TEXTS,
    "user": _TEXTS,
    "request_class": st.sampled_from(("", "default", "batch", "\0")),
    "adapter": st.sampled_from(("", "lora")),
    "cache_salt": st.one_of(_SHORT_TEXTS, st.just("s" * 257)),
    "deadline_ms": st.one_of(st.sampled_from((60_000, 0, 1, 20)), _UINT64S),
}

_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(_CHARS, max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=8,
)
_BROKEN_JSON = ("[", "{}x", "nothing", '"\\ud800"', "[" * 100_000, "9" * 5000, "NaN", "\ufeff[]", '{"a": 1, "a": 2}')
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def _tools(changes: dict[str, Any]) -> str:
    return json.dumps([{**_TOOL, "function": {**_TOOL["function"], **changes}}])  # type: ignore[dict-item]


_TOOL_LISTS = st.one_of(
    st.just(json.dumps([_TOOL])),
    st.dictionaries(st.sampled_from(("name", "description", "parameters", "strict", "x")), _JSON).map(_tools),
    _JSON.map(json.dumps),
    st.sampled_from((*_BROKEN_JSON, json.dumps([_TOOL] * 2), json.dumps([_TOOL] * 200))),
)
_VARIABLES = st.one_of(
    st.dictionaries(st.sampled_from(("a", "messages", "tools", "raise_exception", "")), _JSON).map(json.dumps),
    _JSON.map(json.dumps),
    st.sampled_from(_BROKEN_JSON),
)
_CHAT_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "tools_json": _TOOL_LISTS,
    "tool_choice": st.sampled_from(("", "auto", "none", "required", "f")),
    "parallel_tool_calls": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "template_variables_json": _VARIABLES,
}
_CALLS = st.builds(
    pb.ToolCall,
    id=_SHORT_TEXTS,
    name=st.one_of(st.just("f"), _SHORT_TEXTS),
    arguments_json=st.one_of(st.just("{}"), _JSON.map(json.dumps), st.sampled_from(_BROKEN_JSON)),
)
_MESSAGES = st.builds(
    pb.ChatMessage,
    role=st.one_of(st.sampled_from(("system", "user", "assistant", "tool", "developer")), _SHORT_TEXTS),
    content=st.one_of(_SHORT_TEXTS, st.none(), _TEXTS),
    name=st.one_of(st.just(""), _SHORT_TEXTS),
    tool_calls=st.one_of(st.just([]), st.lists(_CALLS, max_size=2)),
    tool_call_id=st.one_of(st.just(""), _SHORT_TEXTS),
)
