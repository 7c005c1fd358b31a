"""What the typed clients of the Inference service take and give, and its protobuf form. Opens no connection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.client.wire import finish_reason_from_proto, model_info_from_proto, sequence_id_from_proto
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.model_info import ModelInfo
from pdserve.core.sampling import FinishReason
from pdserve.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str | None


Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """None takes the server's default. `deadline_s` counts from the server's receipt of the request."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    min_tokens: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int | None = None
    deadline_s: float | None = None
    label: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted and queued."""

    request_id: SequenceId
    num_prompt_tokens: int
    seed: int
    model: str
    system_fingerprint: str


@dataclass(frozen=True, slots=True)
class Delta:
    """Output tokens of one choice from `first_index` on, and the text that can be shown now; either may be empty."""

    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds per phase, as the coordinator saw them; TTFT = queue + reserve + prefill."""

    queue_s: float
    reserve_s: float
    prefill_s: float
    exposed_transfer_s: float
    decode_s: float
    ttft_s: float
    prefill_worker: str
    decode_worker: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of one choice."""

    choice: int
    finish_reason: FinishReason
    usage: Usage
    timings: Timings


GenerateEvent = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class ServedModel:
    info: ModelInfo
    default_max_tokens: int
    ready: bool


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The message for `prompt`: text, token ids, or a conversation.

    Raises:
        PdserveError: INVALID_ARGUMENT: a value does not fit its field on the wire.
    """
    try:
        request = pb.GenerateRequest(
            model=options.model,
            sampling=_sampling(options),
            n=options.n,
            request_label=options.label,
            cache_salt=options.cache_salt,
            deadline_ms=None if options.deadline_s is None else round(options.deadline_s * 1000),
        )
        _set_prompt(request, prompt)
    except (ValueError, TypeError) as error:
        raise PdserveError(ErrorReason.INVALID_ARGUMENT, f"the request cannot be encoded: {error}") from error
    return request


def event_from_proto(message: pb.GenerateResponse) -> GenerateEvent | None:
    """None for an event of a later protocol version."""
    match message.WhichOneof("event"):
        case "started":
            return _started(message.started)
        case "delta":
            delta = message.delta
            return Delta(delta.choice, delta.first_index, tuple(delta.token_ids), delta.text)
        case "finished":
            return _finished(message.finished)
        case _:
            return None


def served_model_from_proto(message: pb.ServedModel) -> ServedModel:
    return ServedModel(model_info_from_proto(message.info), message.default_max_tokens, message.ready)


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    messages = [item for item in prompt if isinstance(item, Message)]
    if messages:
        request.chat.messages.extend(pb.ChatMessage(role=m.role, content=m.content) for m in messages)
    else:
        request.token_ids.ids.extend(item for item in prompt if not isinstance(item, Message))
        request.token_ids.SetInParent()


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
    )


def _started(message: pb.GenerateResponse.Started) -> Started:
    return Started(
        request_id=sequence_id_from_proto(message.request_id),
        num_prompt_tokens=message.num_prompt_tokens,
        seed=message.seed,
        model=message.model,
        system_fingerprint=message.system_fingerprint,
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
