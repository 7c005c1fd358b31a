"""What a worker insists on before it takes a sequence, whoever sent it: nothing may fail its neighbours' step."""

import math
from collections.abc import Sequence as Seq

from pdserve.core.errors import invalid
from pdserve.core.model_info import ModelInfo
from pdserve.core.sampling import MAX_LOGPROBS, MAX_PROMPT_LOGPROBS, SamplingParams


def check_sequence(
    token_ids: Seq[int], num_prompt_tokens: int, first_output_index: int, sampling: SamplingParams, model: ModelInfo
) -> None:
    """Refuse a sequence that the model cannot run.

    Raises:
        PdserveError: INVALID_ARGUMENT, naming the field and the limit, but no token id of the prompt.
    """
    if not 1 <= num_prompt_tokens <= len(token_ids):
        raise invalid(f"{num_prompt_tokens} prompt tokens of {len(token_ids)} tokens", "num_prompt_tokens")
    if len(token_ids) - num_prompt_tokens != first_output_index:
        raise invalid(f"the first output index cannot be {first_output_index}", "first_output_index")
    if max(token_ids) >= model.vocab_size:
        raise invalid(f"a token id is not below the vocabulary's size, {model.vocab_size}", "token_ids")
    if not first_output_index < sampling.max_tokens <= model.context_length - num_prompt_tokens:
        message = f"{num_prompt_tokens} + {sampling.max_tokens} tokens in a context of {model.context_length}"
        raise invalid(message, "max_tokens")
    _check_numbers(sampling)
    _check_logprobs(sampling, num_prompt_tokens)
    named = [*sampling.stop_token_ids, *sampling.logit_bias]
    if named and max(named) >= model.vocab_size:
        raise invalid(f"an id is not below the vocabulary's size, {model.vocab_size}", "sampling")


def _check_logprobs(sampling: SamplingParams, num_prompt_tokens: int) -> None:
    """What does not fit a message would end the stream of all."""
    asked, of_prompt = sampling.num_logprobs, sampling.num_prompt_logprobs
    if max(asked or 0, of_prompt or 0) > MAX_LOGPROBS:
        raise invalid(f"at most {MAX_LOGPROBS} logprobs come with a token", "num_logprobs")
    if of_prompt is not None and num_prompt_tokens * (of_prompt + 1) > MAX_PROMPT_LOGPROBS:
        message = f"{of_prompt} + 1 logprobs for each of {num_prompt_tokens} prompt tokens: above {MAX_PROMPT_LOGPROBS}"
        raise invalid(message, "num_prompt_logprobs")


def _check_numbers(sampling: SamplingParams) -> None:
    """NaN fails every comparison, so each is written as what must hold."""
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, *sampling.logit_bias.values())
    rules = {
        "temperature": 0.0 <= sampling.temperature < math.inf,
        "top_p": 0.0 < sampling.top_p <= 1.0,
        "min_p": 0.0 <= sampling.min_p <= 1.0,
        "repetition_penalty": 0.0 < sampling.repetition_penalty < math.inf,
        "penalties and logit_bias": all(math.isfinite(value) for value in penalties),
    }
    for name, holds in rules.items():
        if not holds:
            raise invalid(f"{name} is out of range", name)
