from pathlib import Path

import pytest

from pdserve.core.model_fetch import resolve_model
from pdserve.serving.settings import Settings


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real default model, fetched if it is not cached."""
    return resolve_model("smollm2-135m-instruct", Settings().cache_dir.expanduser())
