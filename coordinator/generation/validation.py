"""The one validator of requests, for HTTP and gRPC alike: raw fields in, final ones out. No text, no clock.

What depends on the prompts' lengths, known only after tokenising, is checked in `sequence_requests`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from coordinator.generation import fields
from coordinator.generation.fields import Range
from coordinator.generation.inputs import ChatPrompt, GenerationInput, SamplingInput
from coordinator.generation.served_model import TextModel
from pdserve.core.errors import ErrorReason, PdserveError, invalid
from pdserve.core.sampling import MAX_LOGPROBS, SamplingParams
from pdserve.serving.settings import CoordinatorSettings

MAX_STOP_CHARS = 1024
MAX_SALT_CHARS = 256
SEED_LIMIT = 2**64

RANGES = {
    "temperature": Range(0.0, 100.0),
    "top_p": Range(0.0, 1.0, low_open=True),
    "min_p": Range(0.0, 1.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "repetition_penalty": Range(0.01, 100.0),
    "logit_bias": Range(-100.0, 100.0),
}


@dataclass(frozen=True, slots=True)
class CheckedOptions:
    """A request but for its prompt. `sampling.max_tokens` is 0 where the client named none."""

    sampling: SamplingParams
    num_choices: int
    stop: tuple[str, ...]
    echo: bool
    deadline_s: float
    max_tokens_param: str


def check_options(
    request: GenerationInput, model: TextModel, settings: CoordinatorSettings, random_seed: Callable[[], int]
) -> CheckedOptions:
    """Everything that can be checked without the prompt's tokens.

    Raises:
        PdserveError: INVALID_ARGUMENT or UNSUPPORTED, naming the field at fault.
    """
    _check_request(request)
    raw, vocab_size = request.sampling, model.info.vocab_size
    # Whether it fits the context is told with the prompt's length, in sequence_requests.
    if raw.max_tokens == 0:
        message = f"{raw.max_tokens_param} must be at least 1; to score a prompt, ask for 1 with echo and logprobs"
        raise invalid(message, raw.max_tokens_param)
    max_tokens = fields.integer(raw.max_tokens, 1, 2**63 - 1, raw.max_tokens_param)
    seed = fields.integer(raw.seed, 0, SEED_LIMIT - 1, "seed")
    sampling = replace(
        _check_numbers(raw, vocab_size),
        max_tokens=max_tokens or 0,
        seed=random_seed() if seed is None else seed,
        min_tokens=fields.integer(raw.min_tokens, 0, model.info.context_length, "min_tokens") or 0,
        stop_token_ids=fields.token_ids(raw.stop_token_ids, vocab_size, "stop_token_ids"),
        logit_bias=fields.logit_bias(raw.logit_bias, vocab_size, RANGES["logit_bias"], "logit_bias"),
        ignore_eos=fields.boolean(raw.ignore_eos, "ignore_eos"),
        num_logprobs=fields.integer(raw.logprobs, 0, MAX_LOGPROBS, "logprobs"),
    )
    echo = _check_echo(request)
    if echo:
        sampling = replace(sampling, num_prompt_logprobs=sampling.num_logprobs)
    num_choices = fields.integer(request.n, 1, settings.max_choices, "n") or 1
    if num_choices * len(request.prompts) > settings.max_choices:
        raise invalid(
            f"{len(request.prompts)} prompts × n {num_choices} is more than {settings.max_choices} choices", "n"
        )
    stop = fields.strings(raw.stop, settings.max_stop_strings, MAX_STOP_CHARS, "stop")
    return CheckedOptions(sampling, num_choices, stop, echo, _deadline(request, settings), raw.max_tokens_param)


def _check_numbers(raw: SamplingInput, vocab_size: int) -> SamplingParams:
    def checked(name: str, value: object, default: float) -> float:
        result = fields.number(value, RANGES[name], name)
        return default if result is None else result

    top_k = fields.integer(raw.top_k, -1, 2**31 - 1, "top_k") or 0
    return SamplingParams(
        max_tokens=0,
        temperature=checked("temperature", raw.temperature, 1.0),
        top_k=min(max(top_k, 0), vocab_size),
        top_p=checked("top_p", raw.top_p, 1.0),
        min_p=checked("min_p", raw.min_p, 0.0),
        presence_penalty=checked("presence_penalty", raw.presence_penalty, 0.0),
        frequency_penalty=checked("frequency_penalty", raw.frequency_penalty, 0.0),
        repetition_penalty=checked("repetition_penalty", raw.repetition_penalty, 1.0),
    )


def _deadline(request: GenerationInput, settings: CoordinatorSettings) -> float:
    timeout_s = settings.default_deadline_s if request.timeout_s is None else request.timeout_s
    return request.arrival_s + min(timeout_s, settings.max_deadline_s)


def _check_request(request: GenerationInput) -> None:
    if request.adapter:
        message = "adapter is not supported by this version; serve a checkpoint with the adapter merged into it"
        raise PdserveError(ErrorReason.UNSUPPORTED, message, param="adapter")
    if request.request_class not in ("", "default"):
        raise invalid("there is no such request class (known: default)", "request_class")
    if len(request.cache_salt) > MAX_SALT_CHARS:
        raise invalid(f"cache_salt may have at most {MAX_SALT_CHARS} characters", "cache_salt")


def _check_echo(request: GenerationInput) -> bool:
    echo = fields.boolean(request.echo, "echo")
    if echo and any(isinstance(prompt, ChatPrompt) for prompt in request.prompts):
        message = "echo needs a prompt of text or token ids: a chat's is written by the model's template"
        raise PdserveError(ErrorReason.UNSUPPORTED, message, param="echo")
    return echo
