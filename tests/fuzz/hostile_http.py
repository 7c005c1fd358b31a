"""Requests that no decent client sends, as raw bytes, and what every answer must keep to all the same."""

import json
from dataclasses import dataclass
from typing import Any

import httpx
from hypothesis import strategies as st
from pydantic import BaseModel

from coordinator.http_api.bodies import CompletionBody
from coordinator.http_api.chat_answers import ChatChunk
from coordinator.http_api.chat_body import ChatBody
from coordinator.http_api.completion_answers import CompletionAnswer
from pdserve.core.errors import ErrorReason

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
ALLOWED = {200, 400, 401, 404, 405, 413, 429, 503, 504}
CODES = {*(reason.value for reason in ErrorReason), "not_found", "method_not_allowed"}

# The others are read from what FastAPI's models let through, or by /tokenize and /detokenize.
_OTHER_FIELDS = ("tools", "tool_choice", "functions", "response_format", "top_logprobs", "best_of", "suffix", "tokens")
FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, *_OTHER_FIELDS, "no_such_field"})
VALID: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [5, 6]},
}

# As they stand in the body: the first are no JSON at all, which Python's own parser does not mind.
_LITERALS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-1e400",
    "1e-400",
    "-0.0",
    "1" * 400,
    "0.1e1",
    '"\\ud800"',
    '"\\u0000"',
)
_DEEP = ("[" * 90 + "]" * 90, '{"a":' * 90 + "1" + "}" * 90, "[" * 5_000, '{"a":' * 5_000)

_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 300)
    | st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**30])
    | st.floats()
    | st.text(max_size=30)
    | st.text(st.characters(categories=["Cs"]), min_size=1, max_size=3)
    | st.sampled_from(["", "1", "true", "null", "auto", "<|im_end|>", "{{ 7 * 7 }}", "a" * 3000])
)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
_written = _values.map(json.dumps) | st.sampled_from(_LITERALS) | st.sampled_from(_DEEP)


@st.composite
def _bodies(draw: st.DrawFn, path: str) -> bytes:
    """A valid body with fields added, replaced or given twice, sometimes cut or broken."""
    members = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in VALID[path].items()]
    if "completions" in path and draw(st.booleans()):
        members.append('"stream": true')
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=3)):
        members.insert(draw(st.integers(0, len(members))), f"{json.dumps(name)}: {draw(_written)}")
    body = ("{" + ", ".join(members) + "}").encode()
    match draw(st.sampled_from(["whole"] * 7 + ["cut", "byte", "bare"])):
        case "cut":
            return body[: draw(st.integers(0, min(len(body), 200)))]
        case "byte":
            at = draw(st.integers(0, min(len(body), 200)))
            return body[:at] + draw(st.binary(min_size=1, max_size=2)) + body[at:]
        case "bare":
            return draw(_written | st.just("")).encode()
        case _:
            return body


_visible = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=40)
_seconds = st.sampled_from(["5", "5.5", "3600", "1e9", "0", "-1", "nan", "inf", "0.000001", "9" * 40, "１", "0x10"])
_labels = st.dictionaries(st.sampled_from(["X-Request-Id", "Accept", "X-Odd"]), _visible, max_size=2)
_one_header = {
    "X-Request-Timeout": _seconds | _visible,
    "Authorization": _visible | st.sampled_from(["Bearer", "Bearer ", "Basic YQ==", "Bearer é"]),
    "Content-Type": st.sampled_from(["text/plain", "multipart/form-data", "a/b; charset=x", "é"]),
    "Content-Encoding": st.sampled_from(["gzip", "br", "identity"]),
    "X-Request-Id": st.just("x" * 4000),
}
_headers = st.one_of(_labels, *(st.fixed_dictionaries({name: values}) for name, values in _one_header.items()))


@dataclass(frozen=True)
class RawRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def send(self, http: httpx.Client) -> httpx.Response:
        headers = {name: value.strip().encode() for name, value in self.headers.items()}
        return http.request(self.method, self.path, content=self.body, headers=headers)


@st.composite
def raw_requests(draw: st.DrawFn) -> RawRequest:
    path = draw(st.sampled_from(PATHS))
    method = draw(st.sampled_from(["POST"] * 20 + ["GET", "PUT", "DELETE", "OPTIONS", "HEAD"]))
    return RawRequest(method, path, draw(_headers), draw(_bodies(path)))


def check_answer(method: str, response: httpx.Response) -> None:
    """A status that may be, a label, and strict JSON or events of strict JSON."""
    assert response.status_code in ALLOWED, response.text
    assert response.headers["x-request-id"]
    if method == "HEAD":
        return
    kind = response.headers["content-type"].partition(";")[0]
    if response.status_code == 200 and kind == "text/plain":
        return  # /metrics
    if kind == "text/event-stream":
        assert response.status_code == 200
        _check_events(response.text, ChatChunk if "chat" in response.request.url.path else CompletionAnswer)
        return
    assert kind == "application/json"
    body = strict_json(response.text)
    if response.status_code != 200 and response.request.url.path not in ("/health", "/livez"):
        check_error(body)


def check_error(body: Any) -> None:
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert all(isinstance(error[name], str) and error[name] for name in ("message", "type", "code"))
    assert error["code"] in CODES
    assert error["param"] is None or isinstance(error["param"], str)
    assert len(error["message"]) < 2000


def strict_json(text: str) -> Any:
    """Raises ValueError for NaN and the like, and for text that has no UTF-8."""
    text.encode()
    value = json.loads(text, parse_constant=_refuse)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _check_events(text: str, chunk: type[BaseModel]) -> None:
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    *bodies, last = [event.removeprefix("data: ") for event in events]
    for body in bodies:
        chunk.model_validate(strict_json(body), strict=True, extra="forbid")
    if last != "[DONE]":
        check_error(strict_json(last))


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
