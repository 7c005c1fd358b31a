"""transformers as the judge of our compute: the same weights and the same token ids, in fp32 unless told otherwise."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pdserve.core.model_files import open_model_files
from pdserve.engine.weights import decode_tensor


def build_oracle(
    source: Path, *, round_to: torch.dtype = torch.float32, compute: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """A transformers model on the weights of `source` as we read them, rounded to `round_to`, run in `compute`."""
    files = open_model_files(source)
    config = files.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.attention[0].rope.theta,
            max_position_embeddings=config.context_length,
            tie_word_embeddings=config.tie_word_embeddings,
            attention_bias=config.qkv_bias,
            mlp_bias=config.mlp_bias,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    weights = {tensor.name: decode_tensor(tensor).to(round_to).float() for tensor in files.stored_tensors()}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    model.tie_weights()
    return model.to(compute).eval()


@torch.inference_mode()
def oracle_logits(model: LlamaForCausalLM, token_ids: Sequence[int]) -> torch.Tensor:
    """fp32 logits of every position, [len(token_ids), vocab_size]."""
    return model(torch.tensor([list(token_ids)])).logits[0].float()


@torch.inference_mode()
def oracle_greedy(model: LlamaForCausalLM, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """`num_tokens` greedy tokens after `prompt`; no token ends it."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()
