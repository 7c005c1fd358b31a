"""A model in a GGUF file, its tensors under their Hugging Face names. Dequantises nothing."""

from collections.abc import Mapping
from pathlib import Path

from pdserve.core.model_files.architectures import GGUF_ARCHITECTURES, known
from pdserve.core.model_files.config import ModelConfig, unsupported
from pdserve.core.model_files.files import StoredTensor
from pdserve.core.model_files.gguf_header import read_gguf_header


class GgufFiles:
    """See `files.ModelFiles`."""

    def __init__(self, path: Path) -> None:
        self._source = path
        header = read_gguf_header(path)
        self._metadata = header.metadata
        architecture = str(self._metadata.get("general.architecture", "(none named)"))
        if architecture not in GGUF_ARCHITECTURES:
            raise unsupported(f"GGUF architecture {architecture!r} (known: {known(GGUF_ARCHITECTURES)})")
        parser = GGUF_ARCHITECTURES[architecture]
        self._config = parser.from_gguf(self._metadata, {tensor.name: tensor.dtype for tensor in header.tensors})
        self._tensors: list[StoredTensor] = []
        for tensor in sorted(header.tensors, key=lambda tensor: tensor.offset):
            name = parser.hugging_face_name(tensor.name)
            heads = parser.rope_heads(name, self._config)
            self._tensors.append(
                StoredTensor(name, tensor.dtype, tensor.shape, path, tensor.offset, tensor.num_bytes, heads)
            )

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
