import math
from dataclasses import replace

import pytest

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_info import ModelInfo
from pdserve.core.sampling import MAX_PROMPT_LOGPROBS, SamplingParams
from pdserve.worker.checks import check_sequence

MODEL = ModelInfo("tiny", "f", "Llama", "float32", 100, 2**20, (2,))
PARAMS = SamplingParams(max_tokens=4)


def refusal(params: SamplingParams, num_tokens: int = 3) -> PdserveError:
    with pytest.raises(PdserveError) as caught:
        check_sequence([1] * num_tokens, num_tokens, 0, params, MODEL)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    return caught.value


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused(name: str, value: float) -> None:
    refusal(replace(PARAMS, **{name: value}))


@pytest.mark.parametrize("change", [{"stop_token_ids": frozenset({100})}, {"logit_bias": {100: 1.0}}])
@pytest.mark.parametrize("min_tokens", [0, 2])
def test_ids_beyond_the_vocabulary_are_refused(change: dict[str, object], min_tokens: int) -> None:
    refusal(replace(PARAMS, min_tokens=min_tokens, **change))


@pytest.mark.parametrize(
    ("change", "num_tokens", "param"),
    [
        ({"num_logprobs": 21}, 3, "num_logprobs"),
        ({"num_prompt_logprobs": 21}, 3, "num_logprobs"),
        ({"num_prompt_logprobs": 20}, MAX_PROMPT_LOGPROBS // 21 + 1, "num_prompt_logprobs"),
    ],
)
def test_more_logprobs_than_a_message_holds_are_refused(change: dict[str, int], num_tokens: int, param: str) -> None:
    assert refusal(replace(PARAMS, **change), num_tokens).param == param


def test_the_most_that_is_allowed_and_long_prompts_without_logprobs_pass() -> None:
    most = replace(PARAMS, num_logprobs=20, num_prompt_logprobs=20)
    check_sequence([1] * (MAX_PROMPT_LOGPROBS // 21), MAX_PROMPT_LOGPROBS // 21, 0, most, MODEL)
    check_sequence([1] * (2**19), 2**19, 0, PARAMS, MODEL)
