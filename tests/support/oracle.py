"""transformers as the judge of our compute: the same weights and the same token ids, in fp32 unless told otherwise."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from pdserve.core.model_files import ModelConfig, open_model_files
from pdserve.core.model_files.config import RopeConfig
from pdserve.engine.weights import decode_tensor

disable_progress_bar()
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3_text",
}


def build_oracle(
    source: Path, *, round_to: torch.dtype = torch.float32, compute: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A transformers model on the weights of `source`, all but the norms' rounded to `round_to`, run in `compute`.

    Of a directory transformers reads config and weights itself; of a GGUF file it gets both as we read them.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32) if source.is_dir() else as_read(source)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.copy_(parameter.to(round_to))
    return model.to(compute).eval()


@torch.inference_mode()
def oracle_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """fp32 logits of every position, [len(token_ids), vocab_size]."""
    return model(torch.tensor([list(token_ids)])).logits[0].float()


@torch.inference_mode()
def oracle_greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """`num_tokens` greedy tokens after `prompt`; no token ends it."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


def as_read(source: Path) -> PreTrainedModel:
    """A transformers model in fp32 with config and weights as we read them."""
    files = open_model_files(source)
    config = files.config
    model = AutoModelForCausalLM.from_config(transformers_config(config))
    weights = {tensor.name: decode_tensor(tensor).float() for tensor in files.stored_tensors()}
    divisors = weights.pop("rope_freqs.weight", None)
    if divisors is not None:
        model.model.rotary_emb.inv_freq /= divisors
    if config.sandwich_norms:
        weights |= {name: weight - 1.0 for name, weight in weights.items() if name.endswith("norm.weight")}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    model.tie_weights()
    return model


def transformers_config(config: ModelConfig) -> PretrainedConfig:
    """Our config in transformers' terms."""
    layers = config.attention
    full = next((layer.rope for layer in layers if layer.window is None), layers[0].rope)
    sliding = next((layer for layer in layers if layer.window is not None), None)
    types = ["full_attention" if layer.window is None else "sliding_attention" for layer in layers]
    rope: dict[str, object] = _rope_parameters(full)
    if config.architecture == "Gemma3ForCausalLM":
        rope = {"full_attention": rope, "sliding_attention": _rope_parameters(sliding.rope if sliding else full)}
    elif config.architecture == "MistralForCausalLM":
        types = []
    return AutoConfig.for_model(
        _MODEL_TYPES[config.architecture],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rope,
        max_position_embeddings=full.original_context_length if full.kind == "dynamic" else config.context_length,
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=config.attention_out_bias,
        mlp_bias=config.mlp_bias,
        query_pre_attn_scalar=round(config.attention_scale**-2),
        use_sliding_window=sliding is not None,
        sliding_window=sliding.window if sliding else None,
        **({"layer_types": types} if types else {}),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def _rope_parameters(rope: RopeConfig) -> dict[str, object]:
    if rope.kind in {"default", "factors"}:
        return {"rope_type": "default", "rope_theta": rope.theta}
    found: dict[str, object] = {"rope_type": rope.kind, "rope_theta": rope.theta, "factor": rope.factor}
    named = {
        "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
        "llama3": ("low_freq_factor", "high_freq_factor"),
    }
    if rope.kind in named:
        found |= {name: getattr(rope, name) for name in named[rope.kind]}
        found["original_max_position_embeddings"] = rope.original_context_length
    return found


@torch.inference_mode()
def greedy_after(model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """The judge's choice after each prefix of `output`: equal to `output` if and only if its own greedy output is.

    One forward over prompt and output, where generating would take one for each token; logits of the output alone,
    since a large vocabulary makes those of a long prompt a gigabyte.
    """
    token_ids = torch.tensor([[*prompt, *output[:-1]]])
    return model(token_ids, logits_to_keep=len(output)).logits[0].argmax(-1).tolist()
