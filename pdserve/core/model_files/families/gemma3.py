"""Gemma 3, and the text side of the models that also see images.

Five of six layers have a sliding window and a rope of their own; norms surround attention and MLP; embeddings are
scaled. Norm weights are stored minus one in directories, whole in GGUF files.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import cast

from pdserve.core.model_files import gguf_config, hugging_face_config
from pdserve.core.model_files.architectures import ArchitectureParser
from pdserve.core.model_files.config import AttentionConfig, ModelConfig, RopeConfig, bad_model, unsupported
from pdserve.core.model_files.files import StoredTensor
from pdserve.core.model_files.raw_values import Raw, get_float, get_int, require_count, require_int, section
from pdserve.core.model_files.rope import LAYER_TYPES, read_rope, rope_parameters

_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
_WINDOW = 4096
_THETA, _SLIDING_THETA = 1_000_000.0, 10_000.0
_LAYERS_OF_27B = 62
_REFUSED = ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention")
_TEXT_PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.": ""}
_IMAGE_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_GGUF_LAYER_NAMES = gguf_config.LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class Gemma3Family:
    """See `architectures.ArchitectureParser`. `max_position_embeddings` already counts what rope scaling adds."""

    hugging_face_names = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
    gguf_names = ("gemma3",)

    def from_hugging_face(self, raw: Raw, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        raw = {**_DEFAULTS, **raw}
        for feature in _REFUSED:
            if raw.get(feature):
                raise unsupported(feature)
        slides = hugging_face_config.sliding_layers(
            raw, lambda layer: _slides(layer, require_count(raw, "sliding_window_pattern"))
        )
        window = hugging_face_config.require_window(raw, _WINDOW) if any(slides) else None
        max_positions = get_int(raw, "max_position_embeddings", 131_072)
        full, sliding = _ropes(raw, max_positions)
        attention = hugging_face_config.attention_layers(
            slides, AttentionConfig(full), AttentionConfig(sliding, window)
        )
        config = hugging_face_config.decoder_config(raw, eos_token_ids, attention, max_positions)
        return _gemma(config, require_count(raw, "query_pre_attn_scalar") ** -0.5)

    def from_gguf(self, metadata: Raw, tensor_dtypes: Mapping[str, str]) -> ModelConfig:
        source = gguf_config.gguf_source(metadata, tensor_dtypes)
        for feature in _REFUSED:
            if source.raw.get(feature):
                raise unsupported(feature)
        _, rope = gguf_config.gguf_rope(source, _THETA)
        window = require_count(source.raw, "attention.sliding_window")
        sliding = RopeConfig(get_float(source.raw, "rope.freq_base_swa", _SLIDING_THETA))
        attention = hugging_face_config.attention_layers(
            _gguf_sliding_layers(source.raw), AttentionConfig(rope), AttentionConfig(sliding, window)
        )
        context = require_int(source.raw, "context_length")
        config = gguf_config.decoder_config(source, "Gemma3ForCausalLM", attention, context)
        return _gemma(config, _gguf_attention_scale(source.raw, config))

    def hugging_face_tensor(self, tensor: StoredTensor) -> StoredTensor | None:
        if tensor.name.startswith(_IMAGE_PREFIXES):
            return None
        name = tensor.name
        for prefix, text_prefix in _TEXT_PREFIXES.items():
            if name.startswith(prefix):
                name = text_prefix + name.removeprefix(prefix)
                break
        return replace(tensor, name=name, plus=1.0 if name.endswith("norm.weight") else 0.0)

    def gguf_tensor(self, tensor: StoredTensor, config: ModelConfig) -> StoredTensor:
        return gguf_config.gguf_tensor(tensor, _GGUF_LAYER_NAMES)


def _gemma(config: ModelConfig, attention_scale: float) -> ModelConfig:
    return replace(
        config,
        architecture="Gemma3ForCausalLM",
        attention_scale=attention_scale,
        qk_norm=True,
        sandwich_norms=True,
        activation="gelu_tanh",
        embedding_scale=sqrt(config.hidden_size),
    )


def _ropes(raw: Raw, max_positions: int) -> tuple[RopeConfig, RopeConfig]:
    """Of full and of sliding layers; scaling described once is the full layers'."""
    parameters = section(raw, "rope_parameters")
    if any(layer_type in parameters for layer_type in LAYER_TYPES):
        raw = {**raw, "rope_parameters": None}
    full, sliding = (section(parameters, layer_type) for layer_type in LAYER_TYPES)
    sliding_theta = get_float(raw, "rope_local_base_freq", _SLIDING_THETA)
    return (
        read_rope(rope_parameters(raw) | full, max_positions, _THETA),
        read_rope(sliding, max_positions, sliding_theta),
    )


def _slides(layer: int, pattern: int) -> bool:
    """Every `pattern`-th layer sees everything."""
    return (layer + 1) % pattern != 0


def _gguf_sliding_layers(raw: Raw) -> list[bool]:
    num_layers = gguf_config.num_layers(raw)
    pattern = raw.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        flags = cast("list[object]", pattern)
        if len(flags) != num_layers:
            raise bad_model(f"attention.sliding_window_pattern describes {len(flags)} layers of {num_layers}")
        return [bool(flag) for flag in flags]
    period = require_count({"attention.sliding_window_pattern": 6, **raw}, "attention.sliding_window_pattern")
    return [_slides(layer, period) for layer in range(num_layers)]


def _gguf_attention_scale(raw: Raw, config: ModelConfig) -> float:
    """The 27B alone scales by hidden size over heads, which its files leave unsaid."""
    if raw.get("attention.scale") is None and config.num_layers == _LAYERS_OF_27B:
        return 1.0 / sqrt(config.hidden_size // config.num_heads)
    return config.attention_scale


FAMILY: ArchitectureParser = Gemma3Family()
