"""Qwen3: Qwen2 with norms of each query and key head in place of the biases."""

from collections.abc import Mapping
from dataclasses import replace

from pdserve.core.model_files import gguf_config
from pdserve.core.model_files.architectures import ArchitectureParser
from pdserve.core.model_files.config import ModelConfig
from pdserve.core.model_files.families.qwen2 import read_gguf, read_hugging_face
from pdserve.core.model_files.files import StoredTensor
from pdserve.core.model_files.raw_values import Raw

_DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128}


class Qwen3Family:
    """See `architectures.ArchitectureParser`."""

    hugging_face_names = ("Qwen3ForCausalLM",)
    gguf_names = ("qwen3",)

    def from_hugging_face(self, raw: Raw, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        return replace(read_hugging_face({**_DEFAULTS, **raw}, eos_token_ids), qk_norm=True)

    def from_gguf(self, metadata: Raw, tensor_dtypes: Mapping[str, str]) -> ModelConfig:
        return replace(read_gguf(metadata, tensor_dtypes, "Qwen3ForCausalLM"), qk_norm=True)

    def hugging_face_tensor(self, tensor: StoredTensor) -> StoredTensor | None:
        return tensor

    def gguf_tensor(self, tensor: StoredTensor, config: ModelConfig) -> StoredTensor:
        return gguf_config.gguf_tensor(tensor)


FAMILY: ArchitectureParser = Qwen3Family()
