"""Which architectures are implemented. A new one is a parser in a file of its own and a line in each table."""

from collections.abc import Collection, Mapping
from typing import Protocol

from pdserve.core.model_files import llama
from pdserve.core.model_files.config import ModelConfig


class ArchitectureParser(Protocol):
    """Reads one family's configs and names its tensors. Refuses by name what the family's code does not implement."""

    def from_hugging_face(self, raw: Mapping[str, object], eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """`raw` is config.json."""
        ...

    def from_gguf(self, metadata: Mapping[str, object], tensor_dtypes: Mapping[str, str]) -> ModelConfig:
        """`tensor_dtypes` maps the file's tensor names to their types."""
        ...

    def hugging_face_name(self, gguf_name: str) -> str:
        """The Hugging Face name of a GGUF tensor; the name itself where there is none."""
        ...

    def rope_heads(self, name: str, config: ModelConfig) -> int:
        """Of a Hugging Face name: how many heads' rows GGUF stores as interleaved rotary pairs (0: none)."""
        ...


HUGGING_FACE_ARCHITECTURES: dict[str, ArchitectureParser] = {"LlamaForCausalLM": llama.LlamaParser()}
GGUF_ARCHITECTURES: dict[str, ArchitectureParser] = {"llama": llama.LlamaParser()}


def known(table: Collection[str]) -> str:
    return ", ".join(sorted(table))
