"""Which class computes which architecture."""

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.engine.model.interface import ModelFactory
from pdserve.engine.model.llama import LlamaModel

_MODELS: dict[str, ModelFactory] = {"LlamaForCausalLM": LlamaModel}


def model_factory(architecture: str) -> ModelFactory:
    """The class for `architecture`.

    Raises:
        PdserveError: UNSUPPORTED.
    """
    if architecture not in _MODELS:
        raise PdserveError(ErrorReason.UNSUPPORTED, f"architecture {architecture!r} is not implemented")
    return _MODELS[architecture]
