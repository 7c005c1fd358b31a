"""What a model's files say: its config, where its tensors lie, its raw metadata. Pure Python; loads no weights."""

from pdserve.core.model_files.config import ModelConfig
from pdserve.core.model_files.files import ModelFiles, StoredTensor
from pdserve.core.model_files.open import open_model_files

__all__ = ["ModelConfig", "ModelFiles", "StoredTensor", "open_model_files"]
