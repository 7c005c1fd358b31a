"""Every spelling of rope scaling, the parameters a kind needs, and the context length that follows."""

import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_files.config import RopeConfig
from pdserve.core.model_files.rope import ORIGINAL, context_length, read_rope, rope_parameters
from tests.support.tiny_models import FAMILIES

POSITIONS = 4096
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 512}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 2048}


def rope_of(raw: dict[str, object]) -> RopeConfig:
    return read_rope(rope_parameters(raw), POSITIONS)


def length_of(scaling: dict[str, object]) -> int:
    parameters = rope_parameters({"rope_scaling": scaling})
    return context_length(parameters, read_rope(parameters, POSITIONS), POSITIONS)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, RopeConfig(10_000.0)),
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5}}, RopeConfig(5e5)),
        ({"rope_theta": 1.0, "rope_scaling": None, "rope_parameters": {"rope_theta": 5e5}}, RopeConfig(5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(10_000.0, "linear", 2.0)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 5e5}},
            RopeConfig(5e5, "linear", 2.0),
        ),
        ({"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2}}, RopeConfig(10_000.0)),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, RopeConfig(10_000.0, "dynamic", 2.0, POSITIONS)),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, ORIGINAL: 1024}},
            RopeConfig(10_000.0, "dynamic", 2.0, POSITIONS),
        ),
        ({"rope_parameters": LLAMA3}, RopeConfig(10_000.0, "llama3", 8.0, 512, 1.0, 4.0)),
        ({"rope_scaling": LLAMA3, ORIGINAL: 256}, RopeConfig(10_000.0, "llama3", 8.0, 256, 1.0, 4.0)),
    ],
)
def test_spellings(raw, expected):
    assert rope_of(raw) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_factor": 0.7},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"mscale": 0.707},
        {"factor": None},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"beta_fast": None, "beta_slow": 0},
    ],
)
def test_yarn_is_what_transformers_makes_of_it(changes):
    """transformers computes the same frequencies and attention factor from our reading as from the file."""
    scaling = YARN | changes
    rope = rope_of({"rope_scaling": scaling})
    read = {
        "rope_type": "yarn",
        "factor": rope.factor,
        ORIGINAL: rope.original_context_length,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "attention_factor": rope.attention_factor,
        "truncate": rope.truncate,
    }
    frequencies, attention_factor = transformers_yarn(scaling)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    assert transformers_yarn(read)[0] == frequencies


def transformers_yarn(scaling: dict[str, object]) -> tuple[list[float], float]:
    config = AutoConfig.for_model(**FAMILIES["llama"] | {"rope_scaling": dict(scaling)})
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")
    return frequencies.tolist(), attention_factor


@pytest.mark.parametrize(
    ("scaling", "name"),
    [
        ({"type": "linear"}, "factor"),
        ({"type": "dynamic", "factor": "two"}, "factor"),
        ({"type": "yarn"}, "factor"),
        ({"type": "yarn", "factor": 0.5}, "factor"),
        ({"type": "linear", "factor": 1e300}, "factor"),
        ({key: value for key, value in LLAMA3.items() if key != "low_freq_factor"}, "low_freq_factor"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "high_freq_factor"),
        (LLAMA3 | {ORIGINAL: 0}, ORIGINAL),
        (YARN | {ORIGINAL: -1}, ORIGINAL),
        (YARN | {"beta_fast": -1.0}, "beta_fast"),
        (YARN | {"attention_factor": 0.0}, "attention_factor"),
        (YARN | {"truncate": "no"}, "truncate"),
    ],
)
def test_what_is_missing_or_absurd_is_named(scaling, name):
    with pytest.raises(PdserveError, match=name) as caught:
        rope_of({"rope_scaling": scaling})
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({}, POSITIONS),
        (LLAMA3, POSITIONS),
        (YARN, 8192),
        (YARN | {ORIGINAL: 512}, POSITIONS),
        ({"type": "yarn", "factor": 4.0}, 4 * POSITIONS),
        ({"type": "linear", "factor": 2.5}, 10_240),
        ({"type": "linear", "factor": 2.0, ORIGINAL: 2048}, POSITIONS),
        ({"type": "dynamic", "factor": 4.0}, 4 * POSITIONS),
        ({"type": "dynamic", "factor": 4.0, ORIGINAL: 2048}, 8192),
    ],
)
def test_context_length(scaling, expected):
    assert length_of(scaling) == expected
