"""A GenerateRequest to the neutral GenerationInput. Checks nothing but that JSON is JSON: values are validation's."""

import json
from collections.abc import Mapping
from typing import cast

from coordinator.auth import Caller
from coordinator.generation.inputs import ChatPrompt, GenerationInput, Prompt, SamplingInput, TextPrompt, TokenPrompt
from pdserve.core.errors import invalid
from pdserve.v1 import inference_pb2 as pb


def generation_input(
    request: pb.GenerateRequest, caller: Caller, arrival_s: float, time_remaining_s: float | None
) -> GenerationInput:
    """The neutral form of a request. The nearer of the call's deadline and `deadline_ms` counts.

    Raises:
        PdserveError: INVALID_ARGUMENT: there is no prompt, a JSON field is no JSON, or `deadline_ms` is 0.
    """
    limits = [] if time_remaining_s is None else [max(time_remaining_s, 0.0)]
    if request.HasField("deadline_ms"):
        if request.deadline_ms == 0:
            raise invalid("deadline_ms must be at least 1", "deadline_ms")
        limits.append(request.deadline_ms / 1000)
    return GenerationInput(
        prompts=(_prompt(request),),
        arrival_s=arrival_s,
        model=request.model,
        sampling=_sampling(request.sampling),
        n=request.n if request.HasField("n") else None,
        echo=request.echo,
        timeout_s=min(limits, default=None),
        tenant=caller.tenant,
        request_class=request.request_class,
        adapter=request.adapter,
        cache_salt=request.cache_salt,
        label=request.request_label,
    )


def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "token_ids":
            return TokenPrompt(list(request.token_ids.ids))
        case "chat":
            return _chat(request.chat)
        case _:
            raise invalid("prompt is missing: set text, token_ids or chat", "prompt")


def _chat(chat: pb.ChatPrompt) -> ChatPrompt:
    def given(name: str) -> object:
        return cast("object", getattr(chat, name)) if chat.HasField(name) else None  # type: ignore[arg-type]

    return ChatPrompt(
        messages=[_message(message) for message in chat.messages],
        tools=_from_json(chat.tools_json, "tools_json"),
        tool_choice=chat.tool_choice or None,
        parallel_tool_calls=given("parallel_tool_calls"),
        template_variables=_from_json(chat.template_variables_json, "template_variables_json"),
        add_generation_prompt=given("add_generation_prompt"),
        continue_final_message=given("continue_final_message"),
    )


def _message(message: pb.ChatMessage) -> Mapping[str, object]:
    """As OpenAI's JSON would have it, which is what chat templates know."""
    raw: dict[str, object] = {"role": message.role}
    raw["content"] = message.content if message.HasField("content") else None
    if message.name:
        raw["name"] = message.name
    if message.tool_call_id:
        raw["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        raw["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return raw


def _tool_call(call: pb.ToolCall) -> Mapping[str, object]:
    function = {"name": call.name, "arguments": call.arguments_json or "{}"}
    return {"id": call.id, "type": "function", "function": function}


def _from_json(text: str, param: str) -> object:
    """None for an empty text."""
    if not text:
        return None
    try:
        return cast("object", json.loads(text))
    except (ValueError, RecursionError) as error:
        raise invalid(f"{param} is not valid JSON", param) from error


def _sampling(options: pb.SamplingOptions) -> SamplingInput:
    def given(name: str) -> object:
        return cast("object", getattr(options, name)) if options.HasField(name) else None  # type: ignore[arg-type]

    return SamplingInput(
        max_tokens=given("max_tokens"),
        temperature=given("temperature"),
        top_k=given("top_k"),
        top_p=given("top_p"),
        min_p=given("min_p"),
        presence_penalty=given("presence_penalty"),
        frequency_penalty=given("frequency_penalty"),
        repetition_penalty=given("repetition_penalty"),
        logit_bias=dict(options.logit_bias),
        min_tokens=given("min_tokens"),
        seed=given("seed"),
        stop_token_ids=list(options.stop_token_ids),
        ignore_eos=options.ignore_eos,
        stop=list(options.stop),
        logprobs=given("logprobs"),
    )
