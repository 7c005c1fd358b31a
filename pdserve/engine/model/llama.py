"""The Llama family: ids and positions in, logits out, KV into pages. Knows nothing of requests or of files.

The residual stream is fp32; weights and GEMM inputs are in the load dtype. q, k, v are one matrix, gate and up another.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.core.model_files import ModelConfig
from pdserve.engine.model.interface import ForwardInput
from pdserve_kernels.interface import Kernels, LinearOp

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclass(slots=True)
class _Layer:
    """One decoder layer's weights; norms are [hidden], matrices [out, in], biases None where the model has none."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    attention_out: Tensor
    attention_out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _LayerOps:
    qkv: LinearOp
    attention_out: LinearOp
    gate_up: LinearOp
    down: LinearOp


class LlamaModel:
    """See `interface.Model`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._kernels = kernels
        self._embedding = self._empty(config.vocab_size, config.hidden_size)
        self._head = self._embedding if config.tie_word_embeddings else torch.empty_like(self._embedding)
        self._final_norm = self._empty(config.hidden_size)
        self._layers = [self._empty_layer() for _ in range(config.num_layers)]
        self._cos, self._sin = _rope_tables(config, device)
        self._ops: list[_LayerOps] = []
        self._logits: LinearOp | None = None

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device

    def destinations(self) -> dict[str, Tensor]:
        found = {EMBEDDING: self._embedding, "model.norm.weight": self._final_norm}
        if not self._config.tie_word_embeddings:
            found[LM_HEAD] = self._head
        for index, layer in enumerate(self._layers):
            parts = _layer_destinations(layer, self._config)
            found |= {f"model.layers.{index}.{name}": tensor for name, tensor in parts.items()}
        return found

    def freeze(self) -> None:
        linear = self._kernels.linear
        self._ops = [
            _LayerOps(
                linear(layer.qkv, layer.qkv_bias),
                linear(layer.attention_out, layer.attention_out_bias),
                linear(layer.gate_up, layer.gate_up_bias),
                linear(layer.down, layer.down_bias),
            )
            for layer in self._layers
        ]
        self._logits = self._kernels.logits(self._head)

    @torch.inference_mode()
    def forward(self, rows: ForwardInput) -> Tensor:
        if not self._ops:
            raise RuntimeError("forward before freeze")
        residual = self._embedding[rows.token_ids].float()
        cos, sin = self._cos[rows.positions], self._sin[rows.positions]
        for index, (layer, ops) in enumerate(zip(self._layers, self._ops, strict=True)):
            normed = self._norm(residual, layer.attention_norm).to(self._dtype)
            attended = self._attend(rows, index, ops.qkv(normed), cos, sin)
            residual += ops.attention_out(attended.to(self._dtype))
            normed = self._norm(residual, layer.mlp_norm).to(self._dtype)
            residual += ops.down(self._kernels.silu_mul(ops.gate_up(normed)))
        return residual

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        if self._logits is None:
            raise RuntimeError("logits before freeze")
        return self._logits(self._norm(hidden, self._final_norm))

    def _attend(self, rows: ForwardInput, index: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        config = self._config
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        query, key, value = heads.split_with_sizes((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        rows.step.write_kv(index, self._kernels.rope(key, cos, sin), value)
        return rows.step.attend(index, self._kernels.rope(query, cos, sin), config.attention_scale, None)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, weight, self._config.rms_norm_eps)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _empty_layer(self) -> _Layer:
        config = self._config
        hidden, intermediate = config.hidden_size, config.intermediate_size
        query, merged = (
            config.num_heads * config.head_dim,
            (config.num_heads + 2 * config.num_kv_heads) * config.head_dim,
        )
        return _Layer(
            attention_norm=self._empty(hidden),
            qkv=self._empty(merged, hidden),
            qkv_bias=self._empty(merged) if config.qkv_bias else None,
            attention_out=self._empty(hidden, query),
            attention_out_bias=self._empty(hidden) if config.attention_out_bias else None,
            mlp_norm=self._empty(hidden),
            gate_up=self._empty(2 * intermediate, hidden),
            gate_up_bias=self._empty(2 * intermediate) if config.mlp_bias else None,
            down=self._empty(hidden, intermediate),
            down_bias=self._empty(hidden) if config.mlp_bias else None,
        )


def _layer_destinations(layer: _Layer, config: ModelConfig) -> dict[str, Tensor]:
    """Names within the layer → views into the merged tensors."""
    parts = {
        "input_layernorm.weight": layer.attention_norm,
        "post_attention_layernorm.weight": layer.mlp_norm,
        "self_attn.o_proj.weight": layer.attention_out,
        "mlp.down_proj.weight": layer.down,
    }
    if layer.attention_out_bias is not None:
        parts["self_attn.o_proj.bias"] = layer.attention_out_bias
    if layer.down_bias is not None:
        parts["mlp.down_proj.bias"] = layer.down_bias
    query, shared = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for kind, qkv, gate_up in (("weight", layer.qkv, layer.gate_up), ("bias", layer.qkv_bias, layer.gate_up_bias)):
        if qkv is not None:
            q, k, v = qkv.split_with_sizes((query, shared, shared))
            parts |= {f"self_attn.q_proj.{kind}": q, f"self_attn.k_proj.{kind}": k, f"self_attn.v_proj.{kind}": v}
        if gate_up is not None:
            gate, up = gate_up.chunk(2)
            parts |= {f"mlp.gate_proj.{kind}": gate, f"mlp.up_proj.{kind}": up}
    return parts


def _rope_tables(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [context_length, head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inverse = 1.0 / (config.attention[0].rope.theta ** exponents)
    angles = torch.outer(torch.arange(config.context_length, dtype=torch.float32), inverse)
    return angles.cos().to(device), angles.sin().to(device)
