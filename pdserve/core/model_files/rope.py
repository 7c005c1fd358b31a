"""Rotary embeddings as configs describe them, and the context length that follows. Computes no frequency.

The spellings of config.json: https://huggingface.co/docs/transformers/internal/rope_utils.
"""

from collections.abc import Callable
from math import log

from pdserve.core.model_files.config import RopeConfig, bad_model, unsupported
from pdserve.core.model_files.raw_values import Raw, get_bool, get_float, get_int, require_float, section

ORIGINAL = "original_max_position_embeddings"
LAYER_TYPES = ("full_attention", "sliding_attention")
_MAX_FACTOR = 1e6


def rope_parameters(raw: Raw) -> dict[str, object]:
    """One flat description from config.json: `rope_scaling`, else `rope_parameters`; null values are left out.

    `rope_theta`, `partial_rotary_factor` and the original context length may also stand at the top level.
    """
    scaling, parameters = section(raw, "rope_scaling"), section(raw, "rope_parameters")
    if any(layer_type in parameters for layer_type in LAYER_TYPES):
        raise unsupported("rope_parameters by layer type in this architecture")
    outside = {key: raw.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    outside["rope_theta"] = parameters.get("rope_theta") or outside["rope_theta"]
    found = _given(outside) | _given(scaling or parameters)
    return found | _given({ORIGINAL: raw.get(ORIGINAL)})


def read_rope(parameters: Raw, max_positions: int, default_theta: float = 10_000.0) -> RopeConfig:
    """The rope of a flat description (`{}`: unscaled) in a model of `max_positions` position embeddings.

    Raises:
        PdserveError: UNSUPPORTED for a kind nobody implements; INVALID_ARGUMENT, naming what is missing or absurd.
    """
    if get_float(parameters, "partial_rotary_factor", 1.0) != 1.0:
        raise unsupported("partial_rotary_factor below 1")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if not isinstance(kind, str) or kind not in _READERS:
        raise unsupported(f"rope_scaling {str(kind)[:60]!r} (known: {', '.join(sorted(_READERS))})")
    rope = _READERS[kind](get_float(parameters, "rope_theta", default_theta), parameters, max_positions)
    _check(rope)
    return rope


def context_length(parameters: Raw, rope: RopeConfig, max_positions: int) -> int:
    """How many positions a model offers, of a flat rope description and its `max_position_embeddings`.

    default, llama3, and frequencies scaled by a tensor: as it stands. yarn: what the factor makes of the original
    length, if that is more. linear and dynamic: the same, where a config that gives no original length means
    `max_position_embeddings` by it.
    """
    if rope.kind == "yarn":
        return max(max_positions, int(rope.original_context_length * rope.factor))
    if rope.kind in {"linear", "dynamic"}:
        return max(max_positions, int(get_int(parameters, ORIGINAL, max_positions) * rope.factor))
    return max_positions


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """What yarn multiplies cos and sin by (https://arxiv.org/abs/2309.00071, section 3.4)."""
    return 0.1 * weight * log(factor) + 1.0 if factor > 1.0 else 1.0


def _default(theta: float, _parameters: Raw, _max_positions: int) -> RopeConfig:
    return RopeConfig(theta)


def _linear(theta: float, parameters: Raw, _max_positions: int) -> RopeConfig:
    return RopeConfig(theta, "linear", factor=require_float(parameters, "factor"))


def _dynamic(theta: float, parameters: Raw, max_positions: int) -> RopeConfig:
    """Scaling begins at `max_position_embeddings`, as in transformers, whatever original length is given."""
    factor = require_float(parameters, "factor")
    return RopeConfig(theta, "dynamic", factor=factor, original_context_length=max_positions)


def _llama3(theta: float, parameters: Raw, max_positions: int) -> RopeConfig:
    return RopeConfig(
        theta,
        "llama3",
        factor=require_float(parameters, "factor"),
        original_context_length=get_int(parameters, ORIGINAL, max_positions),
        low_freq_factor=require_float(parameters, "low_freq_factor"),
        high_freq_factor=require_float(parameters, "high_freq_factor"),
    )


def _yarn(theta: float, parameters: Raw, max_positions: int) -> RopeConfig:
    """Without a factor it is the ratio of `max_position_embeddings` to the original length."""
    original = get_int(parameters, ORIGINAL, max_positions)
    if parameters.get("factor") is None and parameters.get(ORIGINAL) is not None and original > 0:
        factor = max_positions / original
    else:
        factor = require_float(parameters, "factor")
    weight, all_dim = get_float(parameters, "mscale", 0.0), get_float(parameters, "mscale_all_dim", 0.0)
    inferred = yarn_attention_factor(factor)
    if weight > 0.0 and all_dim > 0.0:
        inferred = yarn_attention_factor(factor, weight) / yarn_attention_factor(factor, all_dim)
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_context_length=original,
        beta_fast=get_float(parameters, "beta_fast", 32.0) or 32.0,
        beta_slow=get_float(parameters, "beta_slow", 1.0) or 1.0,
        attention_factor=get_float(parameters, "attention_factor", inferred),
        truncate=get_bool(parameters, "truncate", True),
    )


_READERS: dict[str, Callable[[float, Raw, int], RopeConfig]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _check(rope: RopeConfig) -> None:
    needs_original = rope.kind not in {"default", "linear"}
    bands_in_order = 0.0 < rope.low_freq_factor < rope.high_freq_factor
    rules = {
        "rope_theta must be above 1": rope.theta > 1.0,
        "factor must be between 1 and a million": 1.0 <= rope.factor <= _MAX_FACTOR,
        f"{ORIGINAL} must be at least 1": rope.original_context_length >= 1 or not needs_original,
        "low_freq_factor must be above 0 and below high_freq_factor": bands_in_order,
        "beta_fast and beta_slow must be above 0": rope.beta_fast > 0.0 and rope.beta_slow > 0.0,
        "attention_factor must be above 0": rope.attention_factor > 0.0,
    }
    for rule, holds in rules.items():
        if not holds:
            raise bad_model(f"rope scaling {rope.kind!r}: {rule} ({rope})")


def _given(values: Raw) -> dict[str, object]:
    return {key: value for key, value in values.items() if value is not None}
