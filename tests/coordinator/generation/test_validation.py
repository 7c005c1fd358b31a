import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.generation import sequence_requests as sequence_requests_module
from coordinator.generation.inputs import ChatPrompt, GenerationInput, SamplingInput, TextPrompt, TokenPrompt
from coordinator.generation.sequence_requests import check_prompt_lengths, sequence_requests, tenant_salt
from coordinator.generation.validation import check_options
from coordinator.sequences import SequenceRequest
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.serving.settings import CoordinatorSettings
from tests.coordinator.text_fakes import CONTEXT, text_model

MODEL = text_model()
VOCAB = MODEL.info.vocab_size
SETTINGS = CoordinatorSettings(default_max_tokens=16, default_deadline_s=10, max_deadline_s=20, max_choices=4)


def request(num_prompts: int = 1, **sampling: object) -> GenerationInput:
    prompts = tuple(TextPrompt("x", f"prompt[{i}]" if num_prompts > 1 else "prompt") for i in range(num_prompts))
    return GenerationInput(prompts, 100.0, sampling=SamplingInput(**sampling))  # type: ignore[arg-type]


def validate(wanted: GenerationInput, *prompt_lengths: int) -> list[SequenceRequest]:
    options = check_options(wanted, MODEL, SETTINGS, lambda: 4711)
    prompts = [[1] * length for length in prompt_lengths or (5,)]
    return sequence_requests(wanted, options, prompts, MODEL, SETTINGS)


def refusal(wanted: GenerationInput, *prompt_lengths: int) -> PdserveError:
    with pytest.raises(PdserveError) as caught:
        validate(wanted, *prompt_lengths)
    return caught.value


BAD_VALUES: dict[str, list[object]] = {
    "temperature": [-1, -1e-9, 101],
    "top_p": [0, 0.0, -1, 1.5],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, 0.009],
    "top_k": [-2, 1.5, 2**40],
    "seed": [-1, 2**64, 10**400, 0.5],
    "max_tokens": [0, -1, 1.0, 2**63, 10**400],
    "min_tokens": [-1, CONTEXT + 1],
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_numbers_that_are_none_or_out_of_range_are_refused_by_name(name: str) -> None:
    for value in [*BAD_VALUES[name], math.nan, math.inf, -math.inf, "NaN", "1", True, [], {}]:
        error = refusal(request(**{name: value}))
        assert (error.reason, error.param) == (ErrorReason.INVALID_ARGUMENT, name), value
        assert "nan" not in error.message
        assert len(error.message) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {str(VOCAB): 5}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {VOCAB: 5}),
        ("logit_bias", [1]),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", "1"),
        ("stop_token_ids", 1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", ["x"] * 17),
        ("stop", "x" * 1025),
        ("ignore_eos", 1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("stop_token_ids", [1] * 1025),
    ],
)
@pytest.mark.parametrize("min_tokens", [None, 5])
def test_ids_and_strings_are_checked_before_anything_is_scheduled(name: str, value: object, min_tokens: object) -> None:
    error = refusal(request(min_tokens=min_tokens, **{name: value}))
    assert (error.reason, error.param) == (ErrorReason.INVALID_ARGUMENT, name)


def test_a_bias_that_is_no_number_names_its_token() -> None:
    assert refusal(request(logit_bias={"3": math.nan})).param == "logit_bias[3]"


@pytest.mark.parametrize(
    ("change", "param"),
    [({"adapter": "a"}, "adapter")],
)
def test_request_features_not_built_are_refused_by_name(change: dict[str, object], param: str) -> None:
    error = refusal(replace(request(), **change))  # type: ignore[arg-type]
    assert (error.reason, error.param) == (ErrorReason.UNSUPPORTED, param)


def test_every_parameter_reaches_the_sequence() -> None:
    fields: dict[str, object] = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 0.01,
        "logit_bias": {"3": -100, 4: 100},
        "min_tokens": 9,
        "seed": 2**64 - 1,
        "stop_token_ids": [VOCAB - 1],
        "ignore_eos": True,
        "logprobs": 20,
    }
    sampling = validate(request(**fields))[0].sampling
    bias, ids = {3: -100.0, 4: 100.0}, frozenset({VOCAB - 1})
    expected = {**fields, "logit_bias": bias, "stop_token_ids": ids, "num_logprobs": 20}
    del expected["logprobs"]
    assert {name: getattr(sampling, name) for name in expected} == expected
    assert sampling.num_prompt_logprobs is None


@pytest.mark.parametrize(("echo", "logprobs", "of_prompt"), [(True, 5, 5), (True, 0, 0), (True, None, None)])
def test_echo_with_logprobs_asks_for_those_of_the_prompt(echo: bool, logprobs: object, of_prompt: object) -> None:
    wanted = replace(request(logprobs=logprobs), echo=echo)
    assert validate(wanted)[0].sampling.num_prompt_logprobs == of_prompt
    assert check_options(wanted, MODEL, SETTINGS, lambda: 1).echo


def test_a_chat_cannot_be_echoed() -> None:
    error = refusal(replace(request(), prompts=(ChatPrompt([]),), echo=True))
    assert (error.reason, error.param) == (ErrorReason.UNSUPPORTED, "echo")


@pytest.mark.parametrize(("num_tokens", "n", "fits"), [(12_483, 1, True), (12_484, 1, False), (6_242, 2, False)])
def test_logprobs_of_prompts_are_bounded_over_all_choices(num_tokens: int, n: int, fits: bool) -> None:
    wanted, model = replace(request(logprobs=20), echo=True, n=n), text_model(context_length=2**17)
    options = check_options(wanted, model, SETTINGS, lambda: 1)
    prompts = [[1] * num_tokens]
    if fits:
        sequence_requests(wanted, options, prompts, model, SETTINGS)
        return
    with pytest.raises(PdserveError, match=str(2**18)) as caught:
        sequence_requests(wanted, options, prompts, model, SETTINGS)
    assert caught.value.param == "logprobs"


@pytest.mark.parametrize(("max_tokens", "min_tokens"), [(3, 4), (None, 17)])
def test_min_tokens_above_max_tokens_is_refused(max_tokens: object, min_tokens: int) -> None:
    error = refusal(request(max_tokens=max_tokens, min_tokens=min_tokens))
    assert error.param == "min_tokens"
    assert str(min_tokens) in error.message


def test_a_list_of_ids_beyond_the_context_is_refused_by_its_length_alone() -> None:
    wanted = GenerationInput((TokenPrompt([1], "prompt[0]"), TokenPrompt(["?"] * CONTEXT, "prompt[1]")), 0.0)
    options = check_options(wanted, MODEL, SETTINGS, lambda: 1)
    with pytest.raises(PdserveError, match=f"{CONTEXT} tokens") as caught:
        check_prompt_lengths(wanted, options, MODEL)
    assert caught.value.param == "prompt[1]"


def test_defaults() -> None:
    (sequence,) = validate(request())
    sampling = sequence.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (1.0, 1.0, 0, 4711)
    assert (sampling.max_tokens, sequence.deadline_s, sequence.tenant) == (16, 110.0, "default")
    assert sequence.request_class == "default"


def test_top_k_off_and_beyond_the_vocabulary() -> None:
    assert [validate(request(top_k=k))[0].sampling.top_k for k in (-1, 0, 3, 10**6)] == [0, 0, 3, VOCAB]


@given(st.integers(1, CONTEXT + 3), st.one_of(st.none(), st.integers(1, CONTEXT + 3)))
def test_max_tokens_fits_behind_the_prompt_or_the_refusal_tells_the_numbers(prompt: int, asked: int | None) -> None:
    wanted, room = request(max_tokens=asked), CONTEXT - prompt
    if room >= 1 and (asked is None or asked <= room):
        assert validate(wanted, prompt)[0].sampling.max_tokens == (asked or min(room, 16))
        return
    error = refusal(wanted, prompt)
    assert error.param == ("prompt" if room < 1 else "max_tokens")
    for number in (prompt, CONTEXT, *([] if asked is None else [asked])):
        assert str(number) in error.message


def test_an_empty_prompt_is_refused_and_one_token_is_enough() -> None:
    assert refusal(request(), 0).param == "prompt"
    assert validate(request(), 1)[0].token_ids == (1,)


def test_choices_differ_in_number_only_and_share_the_seed() -> None:
    sequences = validate(replace(request(num_prompts=2, seed=3), n=2), 2, 4)
    assert [(len(s.token_ids), s.sampling.choice, s.sampling.seed) for s in sequences] == [
        (2, 0, 3),
        (2, 1, 3),
        (4, 0, 3),
        (4, 1, 3),
    ]


@pytest.mark.parametrize(("n", "num_prompts"), [(0, 1), (-1, 1), (5, 1), (True, 1), (1.0, 1), ("2", 1), (2, 3)])
def test_too_many_or_no_choices(n: object, num_prompts: int) -> None:
    assert refusal(replace(request(num_prompts), n=n), *[1] * num_prompts).param == "n"


@pytest.mark.parametrize(("timeout_s", "deadline_s"), [(None, 110.0), (0.5, 100.5), (1e6, 120.0)])
def test_deadlines_count_from_arrival_and_are_bounded(timeout_s: float | None, deadline_s: float) -> None:
    assert validate(replace(request(), timeout_s=timeout_s))[0].deadline_s == deadline_s


def test_an_unknown_request_class_is_refused() -> None:
    assert refusal(replace(request(), request_class="gold")).param == "request_class"


def test_a_long_salt_is_refused() -> None:
    assert refusal(replace(request(), cache_salt="x" * 257)).param == "cache_salt"


NAMES = st.text(alphabet='ab",[] \\', max_size=4) | st.just("default")


@given(NAMES, NAMES, NAMES, NAMES)
def test_no_two_tenants_and_salts_share_a_prefix(tenant: str, salt: str, other_tenant: str, other_salt: str) -> None:
    same = tenant_salt(tenant, salt) == tenant_salt(other_tenant, other_salt)
    assert same == ((tenant, salt) == (other_tenant, other_salt))


def test_a_sequence_is_salted_with_its_tenant() -> None:
    (plain,) = validate(request())
    (salted,) = validate(replace(request(), tenant="acme", cache_salt="s"))
    assert plain.cache_salt == ""
    assert salted.cache_salt == tenant_salt("acme", "s") == '["acme", "s"]'


def test_the_prompt_at_fault_is_named_among_several() -> None:
    wanted = GenerationInput((TokenPrompt([1], "prompt[0]"), TokenPrompt([], "prompt[1]")), 0.0)
    assert refusal(wanted, 1, 0).param == "prompt[1]"


def test_logprobs_of_outputs_are_bounded_over_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_requests_module, "MAX_OUTPUT_LOGPROBS", 33)
    wanted = request(logprobs=3, max_tokens=4)
    assert len(validate(replace(wanted, n=2))) == 2
    error = refusal(replace(wanted, n=2, sampling=replace(wanted.sampling, max_tokens=5)))
    assert error.param == "logprobs"
    assert "10 × 4" in error.message
