from pathlib import Path

import pytest

from pdserve.core.model_fetch import resolve_model
from pdserve.serving.settings import Settings
from tests.support.tiny_models import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, context 4,096, with a tokenizer."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real default model, fetched if it is not cached."""
    return resolve_model("smollm2-135m-instruct", Settings().cache_dir.expanduser())
