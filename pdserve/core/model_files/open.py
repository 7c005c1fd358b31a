"""Opening a model's files, whichever format they are in."""

from pathlib import Path

from pdserve.core.model_files.config import bad_model
from pdserve.core.model_files.files import ModelFiles
from pdserve.core.model_files.gguf_file import GgufFiles
from pdserve.core.model_files.hugging_face import HuggingFaceFiles


def open_model_files(source: Path) -> ModelFiles:
    """Read the metadata of a Hugging Face directory or a .gguf file.

    Raises:
        PdserveError: UNSUPPORTED, naming what is not implemented; INVALID_ARGUMENT, naming what is missing or broken.
    """
    if source.is_dir():
        return HuggingFaceFiles(source)
    if source.suffix.lower() == ".gguf":
        return GgufFiles(source)
    if source.suffix in {".safetensors", ".json"} and source.is_file():
        raise bad_model(f"{source} is one file of a model: pass the directory, {source.absolute().parent}")
    raise bad_model(f"{source} is neither a directory nor a .gguf file")
