"""What every family reads alike from a GGUF file's metadata, and the names its tensors have at Hugging Face.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; defaults are llama.cpp's.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from pdserve.core.model_files.config import AttentionConfig, ModelConfig, RopeConfig, unsupported
from pdserve.core.model_files.files import StoredTensor
from pdserve.core.model_files.raw_values import (
    Raw,
    as_token_ids,
    get_float,
    get_int,
    require_int,
    require_num_layers,
    unique_sorted,
)
from pdserve.core.model_files.rope import ORIGINAL, read_rope, yarn_attention_factor

ROPE_FREQS = "rope_freqs.weight"
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_EOS_KEYS = ("eos_token_id", "eos_token_ids", "eot_token_id", "eom_token_id")
_ENDS = frozenset(
    {"<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"}
)
_CONTROL, _USER_DEFINED = 3, 4


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A file's metadata, that of its architecture (prefix taken off), and the types of its tensors by name."""

    metadata: Raw
    raw: Raw
    tensor_dtypes: Mapping[str, str]


def gguf_source(metadata: Raw, tensor_dtypes: Mapping[str, str]) -> GgufSource:
    prefix = f"{metadata.get('general.architecture')}."
    raw = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return GgufSource(metadata, raw, tensor_dtypes)


def decoder_config(
    source: GgufSource, architecture: str, attention: tuple[AttentionConfig, ...], context_length: int
) -> ModelConfig:
    """A decoder of the Llama kind, with those biases whose tensors are there, and no other option.

    Raises:
        PdserveError: a key is missing or absurd, or the file asks for what no family implements.
    """
    raw, dtypes = source.raw, source.tensor_dtypes
    num_heads = require_int(raw, "attention.head_count")
    head_dim = _head_dim(raw, num_heads)
    if get_int(raw, "expert_count", 0):
        raise unsupported("mixture of experts", "a dense model of the family works")
    return ModelConfig(
        architecture=architecture,
        vocab_size=get_int(raw, "vocab_size", _num_tokens(source.metadata)),
        num_layers=num_layers(raw),
        hidden_size=require_int(raw, "embedding_length"),
        num_heads=num_heads,
        num_kv_heads=get_int(raw, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=require_int(raw, "feed_forward_length"),
        rms_norm_eps=get_float(raw, "attention.layer_norm_rms_epsilon", 1e-6),
        attention=attention,
        attention_scale=get_float(raw, "attention.scale", 0.0) or max(head_dim, 1) ** -0.5,
        context_length=context_length,
        tie_word_embeddings="output.weight" not in dtypes,
        eos_token_ids=eos_token_ids(source.metadata),
        stored_dtype=dtypes.get("blk.0.ffn_down.weight", "F32"),
        qkv_bias="blk.0.attn_q.bias" in dtypes,
        attention_out_bias="blk.0.attn_output.bias" in dtypes,
        mlp_bias="blk.0.ffn_gate.bias" in dtypes,
    )


def num_layers(raw: Raw) -> int:
    return require_num_layers(raw, "block_count")


def gguf_rope(source: GgufSource, default_theta: float = 10_000.0) -> tuple[dict[str, object], RopeConfig]:
    """The rope as a flat description in config.json's keys, for `rope.context_length`, and what it means.

    Raises:
        PdserveError: its kind or a parameter of it is not implemented, or absurd.
    """
    raw, parameters = source.raw, _rope_parameters(source.raw)
    rope = read_rope(parameters, require_int(raw, "context_length"), default_theta)
    if ROPE_FREQS not in source.tensor_dtypes:
        return parameters, rope
    if rope.kind != "default":
        raise unsupported(f"rope scaling {rope.kind!r} on top of {ROPE_FREQS}")
    return parameters, replace(rope, kind="factors")


def gguf_tensor(tensor: StoredTensor, layer_names: Mapping[str, str] = LAYER_NAMES) -> StoredTensor:
    """Under its Hugging Face name, if it has one."""
    match = _LAYER_TENSOR.fullmatch(tensor.name)
    if match and match[2] in layer_names:
        return replace(tensor, name=f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}")
    return replace(tensor, name=_TOP_LEVEL_NAMES.get(tensor.name, tensor.name))


def _head_dim(raw: Raw, num_heads: int) -> int:
    head_dim = get_int(raw, "attention.key_length", require_int(raw, "embedding_length") // max(num_heads, 1))
    if get_int(raw, "rope.dimension_count", head_dim) != head_dim:
        raise unsupported("partial_rotary_factor below 1")
    if get_int(raw, "attention.value_length", head_dim) != head_dim:
        raise unsupported("value heads of another size than key heads")
    return head_dim


def _rope_parameters(raw: Raw) -> dict[str, object]:
    factor = raw.get("rope.scaling.factor") or raw.get("rope.scale_linear")
    kind = raw.get("rope.scaling.type") or ("linear" if factor else "none")
    parameters: dict[str, object] = {"rope_theta": raw.get("rope.freq_base")}
    if kind == "none":
        return parameters
    parameters |= {"rope_type": kind, "factor": factor, ORIGINAL: raw.get("rope.scaling.original_context_length")}
    if kind == "yarn":
        parameters |= _yarn_parameters(raw)
    return parameters


def _yarn_parameters(raw: Raw) -> dict[str, object]:
    if get_float(raw, "rope.scaling.yarn_ext_factor", 1.0) not in {1.0, -1.0}:
        raise unsupported("rope.scaling.yarn_ext_factor other than 1")
    if get_float(raw, "rope.scaling.yarn_log_multiplier", 0.0):
        raise unsupported("rope.scaling.yarn_log_multiplier")
    scale = get_float(raw, "rope.scaling.attn_factor", 1.0) * get_float(raw, "rope.scaling.yarn_attn_factor", 1.0)
    return {
        "beta_fast": raw.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": raw.get("rope.scaling.yarn_beta_slow"),
        "attention_factor": scale * yarn_attention_factor(get_float(raw, "rope.scaling.factor", 1.0)),
    }


def _num_tokens(metadata: Raw) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    return len(cast("list[object]", tokens)) if isinstance(tokens, list) else 0


def eos_token_ids(metadata: Raw) -> tuple[int, ...]:
    """Those that keys name, and tokens that end a turn or a text: most files name one, and chat models use two."""
    keys = [f"tokenizer.ggml.{key}" for key in _EOS_KEYS]
    named = [token_id for key in keys for token_id in as_token_ids(metadata.get(key), key)]
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not (isinstance(tokens, list) and isinstance(types, list)):
        return unique_sorted(named)
    typed = zip(cast("list[object]", tokens), cast("list[object]", types), strict=False)
    ends = [i for i, (token, kind) in enumerate(typed) if kind in (_CONTROL, _USER_DEFINED) and str(token) in _ENDS]
    return unique_sorted([*named, *ends])
