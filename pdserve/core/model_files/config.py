"""The one description of a model that the engine computes from, whatever file format it came in."""

from dataclasses import dataclass
from typing import Literal

from pdserve.core.errors import ErrorReason, PdserveError

MAX_CONTEXT_LENGTH = 1 << 24
"""Tables of positions must stay within memory, whatever a damaged file says."""

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "factors"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base `theta`, and how its frequencies are scaled. Which fields a kind reads:

    linear, dynamic: `factor` (dynamic also `original_context_length`); llama3: also `low_freq_factor` and
    `high_freq_factor`; yarn: `beta_fast`, `beta_slow`, `attention_factor`, `truncate` instead. "factors": a tensor of
    the checkpoint, `rope_freqs.weight` fp32 [head_dim / 2], divides the frequencies (GGUF's llama3).
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """One layer's attention. With a `window`, a position sees itself and the `window` − 1 positions before it."""

    rope: RopeConfig
    window: int | None = None


Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. `architecture` is the Hugging Face class name; `stored_dtype` that of the file.

    `attention` has one entry a layer. Scores are query · key · `attention_scale`. `qk_norm`: RMS norms of each query
    and key head. `sandwich_norms`: a norm also behind attention and behind the MLP. Embeddings are multiplied by
    `embedding_scale`.
    """

    architecture: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    attention: tuple[AttentionConfig, ...]
    attention_scale: float
    context_length: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    stored_dtype: str
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size"):
            if getattr(self, name) < 1:
                raise bad_model(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise bad_model(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim < 4 or self.head_dim % 2:
            raise bad_model(f"head_dim is {self.head_dim}; rotary embeddings need an even number of at least 4")
        if len(self.attention) != self.num_layers:
            raise bad_model(f"{len(self.attention)} layers' attention is described, of {self.num_layers}")
        if not 1 <= self.context_length <= MAX_CONTEXT_LENGTH:
            raise bad_model(f"context_length is {self.context_length}; it must be from 1 to {MAX_CONTEXT_LENGTH}")
        if not 0.0 <= self.rms_norm_eps < 1.0:
            raise bad_model(f"rms_norm_eps is {self.rms_norm_eps}; it must be at least 0 and below 1")


def unsupported(feature: str, instead: str = "docs/models.md lists what models may have") -> PdserveError:
    """A model feature that is not implemented, refused by name, with what would do instead."""
    return PdserveError(ErrorReason.UNSUPPORTED, f"the model needs {feature}, which is not implemented; {instead}")


def bad_model(message: str) -> PdserveError:
    """Model files that contradict themselves or are incomplete."""
    return PdserveError(ErrorReason.INVALID_ARGUMENT, message, param="model")
