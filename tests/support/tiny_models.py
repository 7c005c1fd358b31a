"""Small random checkpoints of every family with a tokenizer, as a Hugging Face directory or as a GGUF file."""

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_tokenizer import EOS_TOKEN_ID, write_tokenizer

_COMMON: dict[str, object] = {
    "vocab_size": 300,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "eos_token_id": EOS_TOKEN_ID,
    "torch_dtype": "float32",
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 32, "sliding_window": 24}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True}
_SOME_SLIDE = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": 24,
    "sliding_window_pattern": 3,
    "rope_theta": 1e6,
    "rope_local_base_freq": 20000.0,
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": _COMMON | _LLAMA,
    "llama-biased": _COMMON | _LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": _COMMON | _MISTRAL,
    "qwen2": _COMMON | _QWEN2,
    "qwen2-sliding": _COMMON | _QWEN2 | _SOME_SLIDE,
    "qwen3": _COMMON | _QWEN3,
    "gemma3": _COMMON | _GEMMA3,
}
"""config.json by the name of a tiny model, in the spelling that published checkpoints use."""


@dataclass(frozen=True)
class TinyLlama:
    """The shape of a checkpoint; weights follow from `seed`."""

    vocab_size: int = 300
    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 128
    context_length: int = 4096
    tie: bool = True
    bias: bool = False
    seed: int = 0

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": self.context_length,
            "tie_word_embeddings": self.tie,
            "attention_bias": self.bias,
            "mlp_bias": self.bias,
            "hidden_act": "silu",
            "eos_token_id": EOS_TOKEN_ID,
            "torch_dtype": "float32",
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Hugging Face name → fp32 tensor. Matrices are large enough that layers outweigh the input embedding."""
        generator = torch.Generator().manual_seed(self.seed)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator) * (2.0 / columns**0.5)

        def vector(size: int, mean: float) -> torch.Tensor:
            return mean + 0.1 * torch.randn(size, generator=generator)

        hidden, wide = self.hidden_size, self.intermediate_size
        query, shared = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        matrices = {"self_attn.q_proj": (query, hidden), "self_attn.k_proj": (shared, hidden)}
        matrices |= {"self_attn.v_proj": (shared, hidden), "self_attn.o_proj": (hidden, query)}
        matrices |= {"mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}
        found = {"model.embed_tokens.weight": matrix(self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                found[f"{prefix}{name}.weight"] = vector(hidden, 1.0)
            for name, (rows, columns) in matrices.items():
                found[f"{prefix}{name}.weight"] = matrix(rows, columns)
                if self.bias:
                    found[f"{prefix}{name}.bias"] = vector(rows, 0.0)
        found["model.norm.weight"] = vector(hidden, 1.0)
        if not self.tie:
            found["lm_head.weight"] = matrix(self.vocab_size, hidden)
        return found


def write_tiny_llama(directory: Path, **fields: object) -> Path:
    """Write config.json, model.safetensors and the tokenizer's files; `fields` are those of `TinyLlama`."""
    spec = replace(TinyLlama(), **fields)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(spec.config()))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    save_file(spec.tensors(), directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory, spec.vocab_size)
    return directory


def write_tiny_gguf(path: Path, quant: str = "F32", **fields: object) -> Path:
    """The same checkpoint as `write_tiny_llama`'s as GGUF, matrices in `quant`."""
    spec = replace(TinyLlama(), **fields)
    return write_gguf(path, spec.config(), spec.tensors(), quant)


def family_tensors(config: Mapping[str, object], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random fp32 weights of a Hugging Face config, by their names in its checkpoints, as large as `TinyLlama`'s."""
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds, which most tests need not pay

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**deepcopy(dict(config))))
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    gemma = config["model_type"] == "gemma3_text"
    found = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            scaled_later = gemma and "embed_tokens" in name
            found[name] = noise * ((1.0 if scaled_later else 2.0) / shape[1] ** 0.5)
        elif name.endswith(".bias"):
            found[name] = 0.3 * noise
        else:
            found[name] = (0.0 if gemma else 1.0) + 0.2 * noise
    return found


def write_tiny(directory: Path, family: str, *, num_shards: int = 1, seed: int = 0, **changes: object) -> Path:
    """A checkpoint of one of `FAMILIES`, with `changes` to its config.json, in one safetensors file or several."""
    config = FAMILIES[family] | changes
    return _write_directory(directory, config, family_tensors(config, seed), num_shards)


def write_tiny_packed(path: Path, family: str, quant: str = "F32", *, seed: int = 0, **changes: object) -> Path:
    """The same checkpoint as `write_tiny`'s as GGUF, matrices in `quant`."""
    config = FAMILIES[family] | changes
    return write_gguf(path, config, family_tensors(config, seed), quant)


def _write_directory(
    directory: Path, config: Mapping[str, object], tensors: dict[str, torch.Tensor], num_shards: int = 1
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        _write_shards(directory, tensors, num_shards)
    write_tokenizer(directory, int(str(config["vocab_size"])))
    return directory


def _write_shards(directory: Path, tensors: dict[str, torch.Tensor], num_shards: int) -> None:
    names = sorted(tensors)
    files = [f"model-{shard + 1:05}-of-{num_shards:05}.safetensors" for shard in range(num_shards)]
    for shard, file in enumerate(files):
        members = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(members, directory / file, metadata={"format": "pt"})
    weight_map = {name: files[position % num_shards] for position, name in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
