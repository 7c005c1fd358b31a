"""One compute thread wherever the suite computes: its processes share few cores, and OpenMP teams collapse on them."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, context 4,096, with a tokenizer."""
    from tests.support.tiny_models import write_tiny_llama  # imports torch, after the environment is set

    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real default model, from the cache that settings and environment name; fetched if it is not there."""
    return _real_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M, from the same cache."""
    return _real_model("gemma3-270m")


def _real_model(name: str) -> Path:
    from pdserve.core.model_fetch import resolve_model
    from pdserve.serving.settings_loader import load_settings

    settings = load_settings({}, None, os.environ)
    return resolve_model(name, settings.cache_dir.expanduser())
