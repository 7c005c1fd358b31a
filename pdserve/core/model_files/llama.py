"""Llama's configs and tensor names, from Hugging Face and from GGUF. Knows nothing of file layouts."""

import re
from collections.abc import Mapping
from typing import cast

from pdserve.core.model_files.config import (
    AttentionConfig,
    ModelConfig,
    RopeConfig,
    as_token_ids,
    bad_model,
    get_float,
    get_int,
    require_int,
    unique_sorted,
    unsupported,
)

_GGUF_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_LAYER_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")


class LlamaParser:
    """See `architectures.ArchitectureParser`."""

    def from_hugging_face(self, raw: Mapping[str, object], eos_token_ids: tuple[int, ...]) -> ModelConfig:
        raw = {**_section(raw, "text_config"), **raw}
        rope = {**_section(raw, "rope_parameters"), **_section(raw, "rope_scaling")}
        _refuse_hugging_face(raw, rope)
        num_heads = require_int(raw, "num_attention_heads")
        hidden_size = require_int(raw, "hidden_size")
        num_layers = require_int(raw, "num_hidden_layers")
        head_dim = get_int(raw, "head_dim", hidden_size // max(num_heads, 1))
        theta = get_float(rope, "rope_theta", get_float(raw, "rope_theta", 10_000.0))
        return ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=require_int(raw, "vocab_size"),
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=get_int(raw, "num_key_value_heads", num_heads),
            head_dim=head_dim,
            intermediate_size=require_int(raw, "intermediate_size"),
            rms_norm_eps=get_float(raw, "rms_norm_eps", 1e-6),
            attention=(AttentionConfig(RopeConfig(theta)),) * num_layers,
            attention_scale=max(head_dim, 1) ** -0.5,
            context_length=get_int(raw, "max_position_embeddings", 2048),
            tie_word_embeddings=raw.get("tie_word_embeddings") is True,
            eos_token_ids=eos_token_ids,
            stored_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            qkv_bias=raw.get("attention_bias") is True,
            attention_out_bias=raw.get("attention_bias") is True,
            mlp_bias=raw.get("mlp_bias") is True,
        )

    def from_gguf(self, metadata: Mapping[str, object], tensor_dtypes: Mapping[str, str]) -> ModelConfig:
        raw = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
        num_heads = require_int(raw, "attention.head_count")
        hidden_size = require_int(raw, "embedding_length")
        head_dim = get_int(raw, "attention.key_length", hidden_size // max(num_heads, 1))
        num_layers = require_int(raw, "block_count")
        _refuse_gguf(raw, tensor_dtypes, head_dim)
        return ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=get_int(raw, "vocab_size", _num_tokens(metadata)),
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=get_int(raw, "attention.head_count_kv", num_heads),
            head_dim=head_dim,
            intermediate_size=require_int(raw, "feed_forward_length"),
            rms_norm_eps=get_float(raw, "attention.layer_norm_rms_epsilon", 1e-6),
            attention=(AttentionConfig(RopeConfig(get_float(raw, "rope.freq_base", 10_000.0))),) * num_layers,
            attention_scale=max(head_dim, 1) ** -0.5,
            context_length=require_int(raw, "context_length"),
            tie_word_embeddings="output.weight" not in tensor_dtypes,
            eos_token_ids=_gguf_eos(metadata),
            stored_dtype=tensor_dtypes.get("blk.0.ffn_down.weight", "F32"),
            qkv_bias="blk.0.attn_q.bias" in tensor_dtypes,
            attention_out_bias="blk.0.attn_output.bias" in tensor_dtypes,
            mlp_bias="blk.0.ffn_gate.bias" in tensor_dtypes,
        )

    def hugging_face_name(self, gguf_name: str) -> str:
        match = _GGUF_LAYER_NAME.fullmatch(gguf_name)
        if match and match[2] in _GGUF_IN_LAYER:
            return f"model.layers.{match[1]}.{_GGUF_IN_LAYER[match[2]]}.{match[3]}"
        return _GGUF_TOP_LEVEL.get(gguf_name, gguf_name)

    def rope_heads(self, name: str, config: ModelConfig) -> int:
        if ".self_attn.q_proj." in name:
            return config.num_heads
        return config.num_kv_heads if ".self_attn.k_proj." in name else 0


def _section(raw: Mapping[str, object], key: str) -> dict[str, object]:
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_model(f"{key!r} in the model's config is not an object")
    return cast("dict[str, object]", value)


def _refuse_hugging_face(raw: Mapping[str, object], rope: Mapping[str, object]) -> None:
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type != "default":
        raise unsupported(f"rope_scaling {rope_type!r}")
    if get_float(rope, "partial_rotary_factor", get_float(raw, "partial_rotary_factor", 1.0)) != 1.0:
        raise unsupported("partial_rotary_factor below 1")
    if raw.get("sliding_window") is not None and raw.get("use_sliding_window") is not False:
        raise unsupported(f"sliding_window {raw['sliding_window']!r}")
    if raw.get("quantization_config") is not None:
        raise unsupported("quantization_config")
    if raw.get("hidden_act", "silu") != "silu":
        raise unsupported(f"hidden_act {raw['hidden_act']!r}")


def _refuse_gguf(raw: Mapping[str, object], tensor_dtypes: Mapping[str, str], head_dim: int) -> None:
    scaling = raw.get("rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensor_dtypes:
        raise unsupported(f"rope_scaling {scaling if scaling != 'none' else 'llama3'!r}")
    if get_int(raw, "expert_count", 0):
        raise unsupported("mixture of experts")
    if get_int(raw, "attention.sliding_window", 0):
        raise unsupported(f"sliding_window {raw['attention.sliding_window']!r}")
    if get_int(raw, "rope.dimension_count", head_dim) != head_dim:
        raise unsupported("partial_rotary_factor below 1")
    if get_int(raw, "attention.value_length", head_dim) != head_dim:
        raise unsupported("value heads of another size than key heads")


def _num_tokens(metadata: Mapping[str, object]) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    return len(cast("list[object]", tokens)) if isinstance(tokens, list) else 0


def _gguf_eos(metadata: Mapping[str, object]) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eos_token_ids", "tokenizer.ggml.eot_token_id")
    return unique_sorted(token_id for key in keys for token_id in as_token_ids(metadata.get(key), key))
