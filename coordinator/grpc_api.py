"""The Inference service: protobuf on one side, GenerationInput and generation events on the other. Decides nothing."""

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn, cast

import grpc.aio

from coordinator.auth import Authenticator, Caller
from coordinator.generation.generation import ChoiceDelta, ChoiceEnd, Generation, GenerationEvent, PromptEcho
from coordinator.generation.generator import Generator
from coordinator.generation.inputs import ChatPrompt, GenerationInput, Prompt, SamplingInput, TextPrompt, TokenPrompt
from coordinator.generation.served_model import TextModel
from coordinator.sequences import SequenceTimings
from pdserve.client.errors import abort_with
from pdserve.client.wire import finish_reason_to_proto, model_info_to_proto, sequence_id_to_proto
from pdserve.core.errors import ErrorReason, PdserveError, invalid
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ListContext = grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Register with `inference_pb2_grpc.add_InferenceServicer_to_server`."""

    def __init__(self, generator: Generator, authenticator: Authenticator) -> None:
        self._generator = generator
        self._authenticator = authenticator

    # A coroutine that writes, not an async generator: its `finally` blocks run when the call is cancelled.
    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: "Context"
    ) -> None:
        arrival_s = self._generator.clock()
        try:
            caller = self._authenticator.authenticate(_authorization(context))
            _check_size(request, self._generator.settings.max_body_bytes)
            wanted = generation_input(request, caller, arrival_s, context.time_remaining())
            async with self._generator.generate(wanted) as generation:
                await context.write(_started(generation))
                async for event in generation:
                    await context.write(_event(event))
        except PdserveError as error:
            await abort_with(context, error)
        except asyncio.CancelledError:
            await _end_cancelled(context)

    async def ListModels(self, request: pb.ListModelsRequest, context: "ListContext") -> pb.ListModelsResponse:
        try:
            self._authenticator.authenticate(_authorization(context))
        except PdserveError as error:
            await abort_with(context, error)
        return pb.ListModelsResponse(models=[self._served(model) for model in self._generator.models])

    def _served(self, model: TextModel) -> pb.ServedModel:
        default = min(self._generator.settings.default_max_tokens, model.info.context_length - 1)
        ready = self._generator.is_ready(model)
        return pb.ServedModel(info=model_info_to_proto(model.info), default_max_tokens=default, ready=ready)


def generation_input(
    request: pb.GenerateRequest, caller: Caller, arrival_s: float, time_remaining_s: float | None
) -> GenerationInput:
    """The neutral form of a request. The nearer of the call's deadline and `deadline_ms` counts.

    Raises:
        PdserveError: INVALID_ARGUMENT: there is no prompt, or `deadline_ms` is 0.
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
        unsupported=("tools",) if request.chat.tools_json else (),
    )


def _check_size(request: pb.GenerateRequest, max_bytes: int) -> None:
    """The bound that HTTP bodies have: the channel's own is for workers too, and larger."""
    if request.ByteSize() > max_bytes:
        raise PdserveError(ErrorReason.PAYLOAD_TOO_LARGE, f"the request is larger than {max_bytes} bytes")


def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "token_ids":
            return TokenPrompt(list(request.token_ids.ids))
        case "chat":
            return ChatPrompt([_message(message, i) for i, message in enumerate(request.chat.messages)])
        case _:
            raise invalid("prompt is missing: set text, token_ids or chat", "prompt")


def _message(message: pb.ChatMessage, index: int) -> Mapping[str, object]:
    """As OpenAI's JSON would have it, which is what chat templates know."""
    raw: dict[str, object] = {"role": message.role}
    raw["content"] = message.content if message.HasField("content") else None
    if message.name:
        raw["name"] = message.name
    if message.tool_call_id:
        raw["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        raw["tool_calls"] = [_tool_call(call, f"messages[{index}].tool_calls") for call in message.tool_calls]
    return raw


def _tool_call(call: pb.ToolCall, param: str) -> Mapping[str, object]:
    try:
        json.loads(call.arguments_json or "{}")
    except (ValueError, RecursionError) as error:
        raise invalid(f"{param}: arguments_json is not valid JSON", param) from error
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}


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


def _started(generation: Generation) -> pb.GenerateResponse:
    started = pb.GenerateResponse.Started(
        request_id=sequence_id_to_proto(generation.id),
        num_prompt_tokens=generation.num_prompt_tokens,
        seed=generation.seed,
        system_fingerprint=generation.model.info.fingerprint,
        model=generation.model.info.name,
    )
    return pb.GenerateResponse(started=started)


def _event(event: GenerationEvent) -> pb.GenerateResponse:
    match event:
        case PromptEcho():
            return pb.GenerateResponse(delta=pb.GenerateResponse.Delta(choice=event.choice, text=event.text))
        case ChoiceDelta():
            return _delta(event)
        case ChoiceEnd():
            return _finished(event)


def _delta(delta: ChoiceDelta) -> pb.GenerateResponse:
    message = pb.GenerateResponse.Delta(
        choice=delta.choice, first_index=delta.first_index, token_ids=delta.token_ids, text=delta.text
    )
    return pb.GenerateResponse(delta=message)


def _finished(end: ChoiceEnd) -> pb.GenerateResponse:
    usage = pb.Usage(
        prompt_tokens=end.usage.prompt_tokens,
        completion_tokens=end.usage.completion_tokens,
        cached_tokens=end.usage.cached_tokens,
    )
    finished = pb.GenerateResponse.Finished(
        choice=end.choice,
        finish_reason=finish_reason_to_proto(end.finish_reason),
        usage=usage,
        timings=_timings(end.timings),
    )
    return pb.GenerateResponse(finished=finished)


def _timings(timings: SequenceTimings) -> pb.Timings:
    def us(seconds: float) -> int:
        return max(0, round(seconds * 1e6))

    return pb.Timings(
        queue_us=us(timings.queue_s),
        reserve_us=us(timings.reserve_s),
        prefill_us=us(timings.prefill_s),
        exposed_transfer_us=us(timings.exposed_transfer_s),
        decode_us=us(timings.decode_s),
        ttft_us=us(timings.ttft_s),
        prefill_worker=timings.prefill_worker,
        decode_worker=timings.decode_worker,
    )


def _authorization(context: "Context | ListContext") -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str):
            return value
    return None


async def _end_cancelled(context: "Context") -> NoReturn:
    """A cancelled call ends as such; a CancelledError from within would leave its client without any status."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    await abort_with(context, PdserveError(ErrorReason.INTERNAL, "the request was cancelled inside the server"))
