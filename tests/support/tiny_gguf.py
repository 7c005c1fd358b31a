"""Writes a Hugging Face checkpoint as GGUF the way llama.cpp's converter does, by the gguf package's own names."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}


def write_gguf(path: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], quant: str = "F32") -> Path:
    """`config` is config.json in its old spelling; matrices are stored in `quant`, vectors in F32."""
    arch = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _add_shape(writer, config)
    _add_rope(writer, config)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    kind = gguf.GGMLQuantizationType[quant]
    for name, tensor in tensors.items():
        data = _as_stored(name, tensor, config).numpy()
        stored = kind if data.ndim == 2 else gguf.GGMLQuantizationType.F32
        packed = data if stored == gguf.GGMLQuantizationType.F32 else gguf.quantize(data, stored)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), packed, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_shape(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_eos_token_id(config["eos_token_id"])
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        writer.add_sliding_window(config["sliding_window"])
    if "sliding_window_pattern" in config:
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
    if "query_pre_attn_scalar" in config:
        writer.add_attention_scale(config["query_pre_attn_scalar"] ** -0.5)


def _add_rope(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "rope_local_base_freq" in config:
        writer.add_rope_freq_base_swa(config["rope_local_base_freq"])
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type", "default")
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(config))
    elif kind != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def _llama3_divisors(config: Mapping[str, Any]) -> np.ndarray:
    """What each rotary frequency is divided by, fp32 [head_dim / 2]."""
    from transformers import AutoConfig  # takes seconds, which most tests need not pay
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.for_model(**deepcopy(dict(config))), device="cpu")
    exponents = torch.arange(0, config["head_dim"], 2) / config["head_dim"]
    return (config["rope_theta"] ** -exponents / scaled).float().numpy()


def _as_stored(name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Llama's q and k rows in rotary pairs; Gemma's norms whole."""
    if config["model_type"] == "gemma3_text":
        return tensor + 1.0 if name.endswith("norm.weight") else tensor
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if heads is None or config["model_type"] not in {"llama", "mistral"}:
        return tensor
    return tensor.view(heads, 2, config["head_dim"] // 2, -1).transpose(1, 2).reshape(tensor.shape)
