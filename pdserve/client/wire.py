"""Between the values of pdserve.core and their protobuf messages; no decisions are taken here."""

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.model_info import KvLayout, ModelInfo
from pdserve.core.sampling import FinishReason, SamplingParams, TokenLogprobs
from pdserve.v1 import common_pb2 as pb

PROTOCOL_VERSION = 1

_FINISH_TO_PROTO = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FINISH_FROM_PROTO = {value: key for key, value in _FINISH_TO_PROTO.items()}


def finish_reason_to_proto(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    return _FINISH_TO_PROTO[reason]


def finish_reason_from_proto(reason: pb.FinishReason.ValueType) -> FinishReason | None:
    """None: not finished. A value this version does not know counts as an error."""
    return _FINISH_FROM_PROTO.get(reason, FinishReason.ERROR)


def sequence_id_to_proto(sequence_id: SequenceId) -> pb.RequestId:
    return pb.RequestId(coordinator_incarnation=sequence_id.coordinator_incarnation, sequence=sequence_id.sequence)


def sequence_id_from_proto(message: pb.RequestId) -> SequenceId:
    return SequenceId(message.coordinator_incarnation, message.sequence)


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        min_tokens=params.min_tokens,
        seed=params.seed,
        choice=params.choice,
        stop_token_ids=sorted(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        num_logprobs=params.num_logprobs,
        num_prompt_logprobs=params.num_prompt_logprobs,
    )


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=dict(message.logit_bias),
        min_tokens=message.min_tokens,
        seed=message.seed,
        choice=message.choice,
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
    )


def logprobs_to_proto(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    top = [pb.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in logprobs.top]
    return pb.TokenLogprobs(logprob=logprobs.logprob, top=top)


def logprobs_from_proto(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple((entry.token_id, entry.logprob) for entry in message.top))


def kv_layout_to_proto(layout: KvLayout) -> pb.KvLayout:
    return pb.KvLayout(
        dtype=layout.dtype,
        scale_layout=layout.scale_layout,
        block_size=layout.block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        head_shard_rank=layout.head_shard_rank,
        head_shard_size=layout.head_shard_size,
        inner_order=layout.inner_order,
    )


def kv_layout_from_proto(message: pb.KvLayout) -> KvLayout:
    return KvLayout(
        dtype=message.dtype,
        scale_layout=message.scale_layout,
        block_size=message.block_size,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        head_shard_rank=message.head_shard_rank,
        head_shard_size=message.head_shard_size,
        inner_order=message.inner_order,
    )


def model_info_to_proto(info: ModelInfo) -> pb.ModelInfo:
    return pb.ModelInfo(
        name=info.name,
        fingerprint=info.fingerprint,
        architecture=info.architecture,
        dtype=info.dtype,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        eos_token_ids=info.eos_token_ids,
        evaluation_id=info.evaluation_id,
    )


def model_info_from_proto(message: pb.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        fingerprint=message.fingerprint,
        architecture=message.architecture,
        dtype=message.dtype,
        vocab_size=message.vocab_size,
        context_length=message.context_length,
        eos_token_ids=tuple(message.eos_token_ids),
        evaluation_id=message.evaluation_id,
    )


def error_to_proto(error: PdserveError) -> pb.ErrorInfo:
    return pb.ErrorInfo(
        reason=error.reason.name,
        message=error.message,
        retryable=error.retryable,
        retry_after_ms=None if error.retry_after_s is None else round(error.retry_after_s * 1000),
        param=error.param,
    )


def error_from_proto(message: pb.ErrorInfo) -> PdserveError:
    """A reason this version does not know becomes INTERNAL, its name kept in the message."""
    try:
        reason, text = ErrorReason[message.reason], message.message
    except KeyError:
        reason, text = ErrorReason.INTERNAL, f"{message.reason}: {message.message}"
    retry_after_s = message.retry_after_ms / 1000 if message.HasField("retry_after_ms") else None
    return PdserveError(reason, text, param=message.param, retry_after_s=retry_after_s)
