"""The second step of validation, with the prompts' token ids at hand: one SequenceRequest for each choice."""

import json
from collections.abc import Sequence
from dataclasses import replace

from coordinator.auth import DEFAULT_TENANT
from coordinator.generation.inputs import GenerationInput, TokenPrompt
from coordinator.generation.served_model import TextModel
from coordinator.generation.validation import CheckedOptions
from coordinator.sequences import SequenceRequest
from pdserve.core.errors import invalid
from pdserve.core.sampling import MAX_OUTPUT_LOGPROBS, MAX_PROMPT_LOGPROBS
from pdserve.serving.settings import CoordinatorSettings

MAX_LABEL_CHARS = 256


def check_prompt_lengths(request: GenerationInput, options: CheckedOptions, model: TextModel) -> None:
    """Refuse lists of token ids that cannot fit the context, before each of their ids is looked at.

    Raises:
        PdserveError: INVALID_ARGUMENT, naming the prompt.
    """
    for prompt in request.prompts:
        if isinstance(prompt, TokenPrompt):
            _check_prompt_length(len(prompt.token_ids), options, model, prompt.param)


def sequence_requests(
    request: GenerationInput,
    options: CheckedOptions,
    prompts: Sequence[Sequence[int]],
    model: TextModel,
    settings: CoordinatorSettings,
) -> list[SequenceRequest]:
    """One request a choice, prompt by prompt, each with all of its prompt's ids and its final `max_tokens`.

    Raises:
        PdserveError: INVALID_ARGUMENT: a prompt is empty or too long, `max_tokens` does not fit behind it or is less
            than `min_tokens`, or too many logprobs are asked for.
    """
    requests: list[SequenceRequest] = []
    for index, token_ids in enumerate(prompts):
        max_tokens = _max_tokens(len(token_ids), options, model, settings, request.prompts[index].param)
        for choice in range(options.num_choices):
            requests.append(
                SequenceRequest(
                    model=model.info.name,
                    token_ids=tuple(token_ids),
                    sampling=replace(options.sampling, max_tokens=max_tokens, choice=choice),
                    arrival_s=request.arrival_s,
                    deadline_s=options.deadline_s,
                    tenant=request.tenant,
                    request_class=request.request_class or "default",
                    cache_salt=tenant_salt(request.tenant, request.cache_salt),
                    label=request.label[:MAX_LABEL_CHARS],
                )
            )
    num_prompt_tokens = sum(map(len, prompts)) * options.num_choices
    num_output_tokens = sum(request.sampling.max_tokens for request in requests)
    _check_logprobs(options.sampling.num_prompt_logprobs, num_prompt_tokens, MAX_PROMPT_LOGPROBS, "prompt")
    _check_logprobs(options.sampling.num_logprobs, num_output_tokens, MAX_OUTPUT_LOGPROBS, "output")
    return requests


def tenant_salt(tenant: str, cache_salt: str) -> str:
    """What workers salt block keys with: different for any two (tenant, salt) pairs; empty for the default one's none.

    A list in JSON, since a tenant's name joined to a salt could spell another tenant's name and salt.
    """
    if tenant == DEFAULT_TENANT and not cache_salt:
        return ""
    return json.dumps([tenant, cache_salt])


def _max_tokens(
    num_prompt_tokens: int, options: CheckedOptions, model: TextModel, settings: CoordinatorSettings, param: str
) -> int:
    context = model.info.context_length
    asked = options.sampling.max_tokens
    _check_prompt_length(num_prompt_tokens, options, model, param)
    room = context - num_prompt_tokens
    if asked > room:
        message = (
            f"{options.max_tokens_param} is {asked}, but behind the prompt's {num_prompt_tokens} tokens a context of "
            f"{context} has room for {room}"
        )
        raise invalid(message, options.max_tokens_param)
    max_tokens = asked or min(room, settings.default_max_tokens)
    if options.sampling.min_tokens > max_tokens:
        message = f"min_tokens is {options.sampling.min_tokens}, above {options.max_tokens_param}, {max_tokens}"
        raise invalid(message, "min_tokens")
    return max_tokens


def _check_prompt_length(num_prompt_tokens: int, options: CheckedOptions, model: TextModel, param: str) -> None:
    context, asked = model.info.context_length, options.sampling.max_tokens
    if num_prompt_tokens == 0:
        raise invalid(f"{param} is empty: no tokens result from it", param)
    if num_prompt_tokens >= context:
        asked_text = f"; {options.max_tokens_param} is {asked}" if asked else ""
        message = (
            f"the prompt has {num_prompt_tokens} tokens; the context holds {context}, one of which must be left for "
            f"output{asked_text}"
        )
        raise invalid(message, param)


def _check_logprobs(num_top: int | None, num_tokens: int, limit: int, whose: str) -> None:
    """`num_tokens`: the most that all choices may have, each with `num_top` logprobs and its own; None: unasked."""
    if num_top is not None and num_tokens * (num_top + 1) > limit:
        message = (
            f"logprobs {num_top} may give {num_tokens} × {num_top + 1} logprobs of {whose} tokens; at most {limit} "
            "come in one answer: ask for fewer logprobs, choices, prompts or tokens"
        )
        raise invalid(message, "logprobs")
