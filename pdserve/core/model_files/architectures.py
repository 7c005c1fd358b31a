"""Which architectures are implemented: every module of `families`. A new one is one new file there."""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Protocol, cast

from pdserve.core.model_files import families
from pdserve.core.model_files.config import ModelConfig, unsupported
from pdserve.core.model_files.files import StoredTensor
from pdserve.core.model_files.raw_values import Raw


class ArchitectureParser(Protocol):
    """Reads one family's configs and tensors; a module of `families` offers it as `FAMILY`.

    Refuses by name what its architectures may ask for and the engine does not implement.
    """

    @property
    def hugging_face_names(self) -> tuple[str, ...]:
        """Names under `architectures` in config.json."""
        ...

    @property
    def gguf_names(self) -> tuple[str, ...]:
        """Values of `general.architecture`."""
        ...

    def from_hugging_face(self, raw: Raw, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """`raw` is config.json, what `text_config` says merged into it."""
        ...

    def from_gguf(self, metadata: Raw, tensor_dtypes: Mapping[str, str]) -> ModelConfig:
        """`tensor_dtypes` maps the file's tensor names to their types."""
        ...

    def hugging_face_tensor(self, tensor: StoredTensor) -> StoredTensor | None:
        """A tensor of a directory as the engine wants it; None for one that serving text has no use for."""
        ...

    def gguf_tensor(self, tensor: StoredTensor, config: ModelConfig) -> StoredTensor:
        """A tensor of a GGUF file under its Hugging Face name; with its own name where there is none."""
        ...


@cache
def all_families() -> tuple[ArchitectureParser, ...]:
    modules = [info.name for info in pkgutil.iter_modules(families.__path__, f"{families.__name__}.")]
    return tuple(cast("ArchitectureParser", importlib.import_module(name).FAMILY) for name in sorted(modules))


def hugging_face_family(name: str) -> ArchitectureParser:
    """The family of a Hugging Face architecture.

    Raises:
        PdserveError: UNSUPPORTED, listing those there are.
    """
    return _find(
        {name: family for family in all_families() for name in family.hugging_face_names}, "architecture", name
    )


def gguf_family(name: str) -> ArchitectureParser:
    """As `hugging_face_family`, of a GGUF architecture."""
    return _find({name: family for family in all_families() for name in family.gguf_names}, "GGUF architecture", name)


def _find(table: Mapping[str, ArchitectureParser], kind: str, name: str) -> ArchitectureParser:
    if name not in table:
        raise unsupported(f"{kind} {name[:60]!r} (known: {', '.join(sorted(table))})")
    return table[name]
