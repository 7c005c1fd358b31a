"""Small random Llama checkpoints with a tokenizer and a chat template, as a Hugging Face directory or a GGUF file."""

import json
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from string import ascii_lowercase

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_COMMON_PAIRS = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "of")
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


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


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level BPE of exactly `vocab_size` (≥ 259) ids: special tokens, the bytes, then merges of two letters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ġ", letter) for letter in ascii_lowercase] + [tuple(pair) for pair in _COMMON_PAIRS]
    pairs += [pair for pair in product(ascii_lowercase, repeat=2) if pair not in pairs]
    merges = pairs[: vocab_size - len(SPECIAL_TOKENS) - len(letters)]
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *letters, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def write_tiny_gguf(path: Path, quant: str = "F32", **fields: object) -> Path:
    """The same checkpoint as `write_tiny_llama`'s as GGUF: matrices in `quant`, q and k rows in rotary pairs."""
    spec = replace(TinyLlama(), **fields)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(spec.context_length)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    kind = gguf.GGMLQuantizationType[quant]
    for name, tensor in spec.tensors().items():
        data = _interleave(name, tensor, spec).numpy()
        stored = kind if data.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), _quantised(data, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleave(name: str, tensor: torch.Tensor, spec: TinyLlama) -> torch.Tensor:
    heads = spec.num_heads if ".q_proj." in name else spec.num_kv_heads if ".k_proj." in name else 0
    if not heads:
        return tensor
    return tensor.view(heads, 2, spec.head_dim // 2, -1).transpose(1, 2).reshape(tensor.shape)


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def _quantised(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    return data if kind == gguf.GGMLQuantizationType.F32 else gguf.quantize(data, kind)
