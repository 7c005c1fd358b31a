"""Generation events to GenerateResponse messages. Decides nothing."""

from coordinator.generation.generation import ChoiceDelta, ChoiceEnd, Generation, GenerationEvent, PromptEcho
from coordinator.sequences import SequenceTimings
from coordinator.text.tool_calls import ToolCall
from pdserve.client.wire import finish_reason_to_proto, logprobs_to_proto, sequence_id_to_proto
from pdserve.v1 import inference_pb2 as pb


def started_to_proto(generation: Generation) -> pb.GenerateResponse:
    started = pb.GenerateResponse.Started(
        request_id=sequence_id_to_proto(generation.id),
        num_prompt_tokens=generation.num_prompt_tokens,
        seed=generation.seed,
        system_fingerprint=generation.model.info.fingerprint,
        model=generation.model.info.name,
    )
    return pb.GenerateResponse(started=started)


def event_to_proto(event: GenerationEvent) -> pb.GenerateResponse:
    match event:
        case PromptEcho():
            return pb.GenerateResponse(delta=_echo(event))
        case ChoiceDelta():
            return pb.GenerateResponse(delta=_delta(event))
        case ChoiceEnd():
            return pb.GenerateResponse(finished=_finished(event))


def _echo(echo: PromptEcho) -> pb.GenerateResponse.Delta:
    return pb.GenerateResponse.Delta(
        choice=echo.choice,
        text=echo.text,
        is_prompt=True,
        prompt_logprobs=[logprobs_to_proto(entry) for entry in echo.logprobs if entry is not None],
    )


def _delta(delta: ChoiceDelta) -> pb.GenerateResponse.Delta:
    return pb.GenerateResponse.Delta(
        choice=delta.choice,
        first_index=delta.first_index,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=[logprobs_to_proto(entry) for entry in delta.logprobs],
        tool_calls=[_tool_call(call) for call in delta.tool_calls],
    )


def _tool_call(call: ToolCall) -> pb.ToolCall:
    return pb.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments)


def _finished(end: ChoiceEnd) -> pb.GenerateResponse.Finished:
    usage = pb.Usage(
        prompt_tokens=end.usage.prompt_tokens,
        completion_tokens=end.usage.completion_tokens,
        cached_tokens=end.usage.cached_tokens,
    )
    return pb.GenerateResponse.Finished(
        choice=end.choice,
        finish_reason=finish_reason_to_proto(end.finish_reason),
        usage=usage,
        timings=_timings(end.timings),
    )


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
