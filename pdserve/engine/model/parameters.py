"""A decoder's parameters: allocated empty, named as in Hugging Face checkpoints. Computes nothing.

q, k, v are one matrix, gate and up another. Matrices and biases are in the load dtype, norms' weights always in fp32.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.core.model_files import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Projection:
    """`weight` [out, in] and `bias` [out], None where the model has none."""

    weight: Tensor
    bias: Tensor | None

    def split(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
        """Names within the layer and views of the matrices, of `sizes` rows, that were put together here."""
        for kind, tensor in (("weight", self.weight), ("bias", self.bias)):
            if tensor is not None:
                for name, part in zip(names, tensor.split_with_sizes(sizes), strict=True):
                    yield f"{name}.{kind}", part


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """One decoder layer. Norms are [hidden], those of query and key heads [head_dim]; None: the model has none."""

    attention_norm: Tensor
    qkv: Projection
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_out: Projection
    attention_out_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection
    down_norm: Tensor | None


class DecoderParameters:
    """All that a checkpoint gives. On the meta device it takes no memory and still has its size."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self.embedding = self._matrix(config.vocab_size, config.hidden_size)
        self.head = self.embedding if config.tie_word_embeddings else torch.empty_like(self.embedding)
        self.final_norm = self._norm(config.hidden_size)
        self.layers = [self._layer() for _ in range(config.num_layers)]
        has_factors = any(attention.rope.kind == "factors" for attention in config.attention)
        self.rope_factors = self._norm(config.head_dim // 2) if has_factors else None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.destinations().values())

    def destinations(self) -> dict[str, Tensor]:
        """See `interface.Model.destinations`."""
        found = {EMBEDDING: self.embedding, FINAL_NORM: self.final_norm}
        if not self._config.tie_word_embeddings:
            found[LM_HEAD] = self.head
        if self.rope_factors is not None:
            found[ROPE_FACTORS] = self.rope_factors
        for index, layer in enumerate(self.layers):
            parts = self._layer_norms(layer) | dict(self._layer_projections(layer))
            found |= {f"model.layers.{index}.{name}": tensor for name, tensor in parts.items()}
        return found

    def _layer_norms(self, layer: LayerParameters) -> dict[str, Tensor]:
        """Gemma's `post_attention_layernorm` is behind attention, Llama's before the MLP."""
        sandwiched = self._config.sandwich_norms
        norms = {
            "input_layernorm": layer.attention_norm,
            "pre_feedforward_layernorm" if sandwiched else "post_attention_layernorm": layer.mlp_norm,
        }
        if layer.attention_out_norm is not None and layer.down_norm is not None:
            norms |= {
                "post_attention_layernorm": layer.attention_out_norm,
                "post_feedforward_layernorm": layer.down_norm,
            }
        if layer.query_norm is not None and layer.key_norm is not None:
            norms |= {"self_attn.q_norm": layer.query_norm, "self_attn.k_norm": layer.key_norm}
        return {f"{name}.weight": tensor for name, tensor in norms.items()}

    def _layer_projections(self, layer: LayerParameters) -> Iterator[tuple[str, Tensor]]:
        config = self._config
        query, shared = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        yield from layer.qkv.split(
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (query, shared, shared)
        )
        yield from layer.attention_out.split(("self_attn.o_proj",), (config.hidden_size,))
        yield from layer.gate_up.split(("mlp.gate_proj", "mlp.up_proj"), (config.intermediate_size,) * 2)
        yield from layer.down.split(("mlp.down_proj",), (config.hidden_size,))

    def _layer(self) -> LayerParameters:
        config = self._config
        hidden, intermediate, dim = config.hidden_size, config.intermediate_size, config.head_dim
        merged = (config.num_heads + 2 * config.num_kv_heads) * dim
        return LayerParameters(
            attention_norm=self._norm(hidden),
            qkv=self._projection(merged, hidden, config.qkv_bias),
            query_norm=self._norm(dim) if config.qk_norm else None,
            key_norm=self._norm(dim) if config.qk_norm else None,
            attention_out=self._projection(hidden, config.num_heads * dim, config.attention_out_bias),
            attention_out_norm=self._norm(hidden) if config.sandwich_norms else None,
            mlp_norm=self._norm(hidden),
            gate_up=self._projection(2 * intermediate, hidden, config.mlp_bias),
            down=self._projection(hidden, intermediate, config.mlp_bias),
            down_norm=self._norm(hidden) if config.sandwich_norms else None,
        )

    def _projection(self, num_out: int, num_in: int, bias: bool) -> Projection:
        return Projection(self._matrix(num_out, num_in), self._matrix(num_out) if bias else None)

    def _matrix(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _norm(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=self._device)
