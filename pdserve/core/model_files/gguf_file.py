"""A model in a GGUF file, its tensors under their Hugging Face names. Dequantises nothing."""

from collections.abc import Mapping
from pathlib import Path

from pdserve.core.model_files.architectures import gguf_family
from pdserve.core.model_files.config import ModelConfig, bad_model, unsupported
from pdserve.core.model_files.files import StoredTensor
from pdserve.core.model_files.gguf_header import read_gguf_header


class GgufFiles:
    """See `files.ModelFiles`."""

    def __init__(self, path: Path) -> None:
        self._source = path
        header = read_gguf_header(path)
        self._metadata = header.metadata
        if self._metadata.get("split.count", 1) not in {0, 1}:
            raise unsupported(f"a GGUF file split into {self._metadata['split.count']}", "merged into one it works")
        family = gguf_family(_architecture(self._metadata))
        self._config = family.from_gguf(self._metadata, {tensor.name: tensor.dtype for tensor in header.tensors})
        self._tensors = [
            family.gguf_tensor(StoredTensor(t.name, t.dtype, t.shape, path, t.offset, t.num_bytes), self._config)
            for t in sorted(header.tensors, key=lambda tensor: tensor.offset)
        ]

    @property
    def source(self) -> Path:
        return self._source

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def gguf_metadata(self) -> Mapping[str, object] | None:
        return self._metadata

    def stored_tensors(self) -> list[StoredTensor]:
        return self._tensors


def _architecture(metadata: Mapping[str, object]) -> str:
    name = metadata.get("general.architecture")
    if name is None:
        raise bad_model("general.architecture is missing in the GGUF file's metadata")
    return str(name)
