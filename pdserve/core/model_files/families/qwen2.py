"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a sliding window in its upper layers, seldom switched on."""

from collections.abc import Mapping
from dataclasses import replace

from pdserve.core.model_files import gguf_config, hugging_face_config
from pdserve.core.model_files.architectures import ArchitectureParser
from pdserve.core.model_files.config import AttentionConfig, ModelConfig, bad_model, unsupported
from pdserve.core.model_files.files import StoredTensor
from pdserve.core.model_files.raw_values import Raw, get_bool, get_int
from pdserve.core.model_files.rope import context_length, read_rope, rope_parameters

_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "max_window_layers": 28}
_WINDOW = 4096


class Qwen2Family:
    """See `architectures.ArchitectureParser`."""

    hugging_face_names = ("Qwen2ForCausalLM",)
    gguf_names = ("qwen2",)

    def from_hugging_face(self, raw: Raw, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        config = read_hugging_face({**_DEFAULTS, **raw}, eos_token_ids)
        return replace(config, qkv_bias=True, attention_out_bias=False)

    def from_gguf(self, metadata: Raw, tensor_dtypes: Mapping[str, str]) -> ModelConfig:
        return replace(read_gguf(metadata, tensor_dtypes, "Qwen2ForCausalLM"), qkv_bias=True)

    def hugging_face_tensor(self, tensor: StoredTensor) -> StoredTensor | None:
        return tensor

    def gguf_tensor(self, tensor: StoredTensor, config: ModelConfig) -> StoredTensor:
        return gguf_config.gguf_tensor(tensor)


def read_hugging_face(raw: Raw, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """What Qwen2 and Qwen3 have in common."""
    if raw.get("dual_chunk_attention_config"):
        raise unsupported(
            "dual_chunk_attention_config", "without that key it works up to the length it was trained for"
        )
    max_positions = get_int(raw, "max_position_embeddings", 32_768)
    parameters = rope_parameters(raw)
    rope = read_rope(parameters, max_positions)
    slides = _sliding_layers(raw)
    window = hugging_face_config.require_window(raw, _WINDOW) if any(slides) else None
    attention = hugging_face_config.attention_layers(slides, AttentionConfig(rope), AttentionConfig(rope, window))
    context = context_length(parameters, rope, max_positions)
    return hugging_face_config.decoder_config(raw, eos_token_ids, attention, context)


def read_gguf(metadata: Raw, tensor_dtypes: Mapping[str, str], architecture: str) -> ModelConfig:
    """What Qwen2 and Qwen3 have in common."""
    source = gguf_config.gguf_source(metadata, tensor_dtypes)
    if get_int(source.raw, "attention.sliding_window", 0):
        raise unsupported("sliding_window in a Qwen GGUF file", "a directory, which says which layers slide, works")
    parameters, rope = gguf_config.gguf_rope(source)
    attention = (AttentionConfig(rope),) * gguf_config.num_layers(source.raw)
    context = context_length(parameters, rope, get_int(source.raw, "context_length", 0))
    return gguf_config.decoder_config(source, architecture, attention, context)


def _sliding_layers(raw: Raw) -> list[bool]:
    enabled = get_bool(raw, "use_sliding_window", False) and raw.get("sliding_window", _WINDOW) is not None
    first = get_int(raw, "max_window_layers", 28)
    slides = hugging_face_config.sliding_layers(raw, lambda layer: enabled and layer >= first)
    if any(slides) and not enabled:
        raise bad_model("layer_types names sliding layers, but use_sliding_window or sliding_window is off")
    return slides


FAMILY: ArchitectureParser = Qwen2Family()
