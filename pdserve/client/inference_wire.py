"""Between the typed clients' values and the Inference service's messages. Checks only what the wire cannot carry."""

import json
from collections.abc import Sequence

from pdserve.client.inference import (
    Delta,
    Finished,
    GenerateEvent,
    GenerateOptions,
    Message,
    Prompt,
    PromptEcho,
    ServedModel,
    Started,
    Timings,
    ToolCall,
    Usage,
)
from pdserve.client.wire import (
    finish_reason_from_proto,
    logprobs_from_proto,
    model_info_from_proto,
    sequence_id_from_proto,
)
from pdserve.core.errors import ErrorReason, PdserveError, invalid
from pdserve.core.sampling import FinishReason
from pdserve.v1 import inference_pb2 as pb

_CHAT_OPTIONS = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "template_variables",
    "add_generation_prompt",
    "continue_final_message",
)


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The message for `prompt`: text, token ids, or a conversation.

    Raises:
        PdserveError: INVALID_ARGUMENT: a value does not fit its field on the wire, or is for conversations only.
    """
    try:
        request = pb.GenerateRequest(
            model=options.model,
            sampling=_sampling(options),
            n=options.n,
            echo=options.echo,
            request_label=options.label,
            cache_salt=options.cache_salt,
            deadline_ms=None if options.deadline_s is None else round(options.deadline_s * 1000),
        )
        _set_prompt(request, prompt, options)
    except (ValueError, TypeError, OverflowError) as error:
        raise PdserveError(ErrorReason.INVALID_ARGUMENT, f"the request cannot be encoded: {error}") from error
    return request


def event_from_proto(message: pb.GenerateResponse) -> GenerateEvent | None:
    """None for an event of a later protocol version."""
    match message.WhichOneof("event"):
        case "started":
            return _started(message.started)
        case "delta":
            return _delta(message.delta)
        case "finished":
            return _finished(message.finished)
        case _:
            return None


def served_model_from_proto(message: pb.ServedModel) -> ServedModel:
    return ServedModel(model_info_from_proto(message.info), message.default_max_tokens, message.ready)


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt, options: GenerateOptions) -> None:
    if not isinstance(prompt, str) and any(isinstance(item, Message) for item in prompt):
        request.chat.CopyFrom(_chat(prompt, options))
        return
    for name in _CHAT_OPTIONS:
        if getattr(options, name) not in ((), [], {}, "", None):
            raise invalid(f"{name} is for conversations only: give a list of Message", name)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(item for item in prompt if not isinstance(item, Message))
        request.token_ids.SetInParent()


def _chat(prompt: Sequence[Message | int], options: GenerateOptions) -> pb.ChatPrompt:
    return pb.ChatPrompt(
        messages=[_message(item, f"messages[{index}]") for index, item in enumerate(prompt)],
        tools_json=_to_json(list(options.tools)),
        tool_choice=options.tool_choice,
        parallel_tool_calls=options.parallel_tool_calls,
        template_variables_json=_to_json(dict(options.template_variables)),
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
    )


def _to_json(value: object) -> str:
    """Nothing at all for what is empty."""
    return json.dumps(value, allow_nan=False) if value else ""


def _message(item: Message | int, param: str) -> pb.ChatMessage:
    if not isinstance(item, Message):
        raise invalid(f"{param} must be a Message, as the others are", param)
    calls = [pb.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments) for call in item.tool_calls]
    return pb.ChatMessage(
        role=item.role, content=item.content, name=item.name, tool_calls=calls, tool_call_id=item.tool_call_id
    )


def _sampling(options: GenerateOptions) -> pb.SamplingOptions:
    return pb.SamplingOptions(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        logit_bias=options.logit_bias,
        min_tokens=options.min_tokens,
        seed=options.seed,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        stop=options.stop,
        logprobs=options.logprobs,
    )


def _started(message: pb.GenerateResponse.Started) -> Started:
    return Started(
        request_id=sequence_id_from_proto(message.request_id),
        num_prompt_tokens=message.num_prompt_tokens,
        seed=message.seed,
        model=message.model,
        system_fingerprint=message.system_fingerprint,
    )


def _delta(message: pb.GenerateResponse.Delta) -> PromptEcho | Delta:
    if message.is_prompt:
        logprobs = tuple(logprobs_from_proto(entry) for entry in message.prompt_logprobs)
        return PromptEcho(message.choice, message.text, logprobs)
    return Delta(
        choice=message.choice,
        first_index=message.first_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=tuple(logprobs_from_proto(entry) for entry in message.logprobs),
        tool_calls=tuple(ToolCall(call.id, call.name, call.arguments_json) for call in message.tool_calls),
    )


def _finished(message: pb.GenerateResponse.Finished) -> Finished:
    usage = Usage(message.usage.prompt_tokens, message.usage.completion_tokens, message.usage.cached_tokens)
    reason = finish_reason_from_proto(message.finish_reason) or FinishReason.ERROR
    return Finished(message.choice, reason, usage, _timings(message.timings))


def _timings(message: pb.Timings) -> Timings:
    return Timings(
        queue_s=message.queue_us / 1e6,
        reserve_s=message.reserve_us / 1e6,
        prefill_s=message.prefill_us / 1e6,
        exposed_transfer_s=message.exposed_transfer_us / 1e6,
        decode_s=message.decode_us / 1e6,
        ttft_s=message.ttft_us / 1e6,
        prefill_worker=message.prefill_worker,
        decode_worker=message.decode_worker,
    )
