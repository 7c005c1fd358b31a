"""Llama, and Mistral, which is Llama with a sliding window in every layer."""

from collections.abc import Mapping
from dataclasses import replace

from pdserve.core.model_files import gguf_config, hugging_face_config
from pdserve.core.model_files.architectures import ArchitectureParser
from pdserve.core.model_files.config import AttentionConfig, ModelConfig, unsupported
from pdserve.core.model_files.files import StoredTensor
from pdserve.core.model_files.raw_values import Raw, get_int
from pdserve.core.model_files.rope import context_length, read_rope, rope_parameters

LLAMA, MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131_072}
_MISTRAL_WINDOW = 4096


class LlamaFamily:
    """See `architectures.ArchitectureParser`."""

    hugging_face_names = (LLAMA, MISTRAL)
    gguf_names = ("llama",)

    def from_hugging_face(self, raw: Raw, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        if hugging_face_config.architecture_name(raw) == MISTRAL:
            raw = {**_MISTRAL_DEFAULTS, **raw}
        max_positions = get_int(raw, "max_position_embeddings", 2048)
        parameters = rope_parameters(raw)
        rope = read_rope(parameters, max_positions)
        attention = (AttentionConfig(rope, _window(raw)),) * hugging_face_config.num_layers(raw)
        context = context_length(parameters, rope, max_positions)
        return hugging_face_config.decoder_config(raw, eos_token_ids, attention, context)

    def from_gguf(self, metadata: Raw, tensor_dtypes: Mapping[str, str]) -> ModelConfig:
        """Mistral's files say that they are Llama's; a window tells them apart."""
        source = gguf_config.gguf_source(metadata, tensor_dtypes)
        parameters, rope = gguf_config.gguf_rope(source)
        window = get_int(source.raw, "attention.sliding_window", 0) or None
        attention = (AttentionConfig(rope, window),) * gguf_config.num_layers(source.raw)
        context = context_length(parameters, rope, get_int(source.raw, "context_length", 0))
        return gguf_config.decoder_config(source, MISTRAL if window else LLAMA, attention, context)

    def hugging_face_tensor(self, tensor: StoredTensor) -> StoredTensor | None:
        return tensor

    def gguf_tensor(self, tensor: StoredTensor, config: ModelConfig) -> StoredTensor:
        """llama.cpp rotates neighbouring rows of a head, so its converter reorders the rows of q and k."""
        tensor = gguf_config.gguf_tensor(tensor)
        if ".self_attn.q_proj." in tensor.name:
            return replace(tensor, rope_heads=config.num_heads)
        if ".self_attn.k_proj." in tensor.name:
            return replace(tensor, rope_heads=config.num_kv_heads)
        return tensor


def _window(raw: Raw) -> int | None:
    if hugging_face_config.architecture_name(raw) == LLAMA:
        if raw.get("sliding_window") is not None and raw.get("use_sliding_window") is not False:
            raise unsupported("sliding_window in LlamaForCausalLM", "MistralForCausalLM may have one")
        return None
    has_window = raw.get("sliding_window", _MISTRAL_WINDOW) is not None
    slides = hugging_face_config.sliding_layers(raw, lambda _: has_window)
    if any(slides) != all(slides):
        raise unsupported("layer_types that differ in MistralForCausalLM")
    return hugging_face_config.require_window(raw, _MISTRAL_WINDOW) if all(slides) else None


FAMILY: ArchitectureParser = LlamaFamily()
