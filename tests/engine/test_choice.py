"""Which kernels are used, and what is said while they are compiled."""

import logging
from pathlib import Path

import pytest
import torch

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_files import ModelConfig, open_model_files
from pdserve.engine.model.choice import KernelChoice, ModelOptions, empty_model, prepare_kernels
from pdserve_kernels.host import why_not_here
from tests.support.tiny_models import write_tiny_llama

pytestmark = pytest.mark.skipif(bool(why_not_here()), reason=f"native kernels cannot run: {why_not_here()}")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return open_model_files(write_tiny_llama(tmp_path_factory.mktemp("tiny"))).config


def options(kernels: KernelChoice = "auto", dtype: torch.dtype = torch.bfloat16, block_size: int = 16) -> ModelOptions:
    return ModelOptions(dtype, torch.device("cpu"), block_size, max_rows=8, max_samples=8, kernels=kernels)


def messages_of_preparing(config: ModelConfig, caplog: pytest.LogCaptureFixture, chosen: ModelOptions) -> list[str]:
    caplog.clear()
    caplog.set_level(logging.INFO)
    prepare_kernels(config, chosen)
    return [record.message for record in caplog.records]


def test_compiling_is_announced_and_kept_kernels_are_not(
    config: ModelConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepare_kernels(config, options())
    assert messages_of_preparing(config, caplog, options()) == []
    monkeypatch.setattr("pdserve_kernels.cpu.compiled.cache_folder", lambda: tmp_path)
    before, after = messages_of_preparing(config, caplog, options())
    assert before.startswith("compiling kernels")
    assert str(tmp_path) in before
    assert after.startswith("kernels compiled in")


@pytest.mark.parametrize("chosen", [options("torch"), options(dtype=torch.float16), options(block_size=7)])
def test_nothing_is_compiled_for_torch(
    config: ModelConfig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    chosen: ModelOptions,
) -> None:
    monkeypatch.setattr("pdserve_kernels.cpu.compiled.cache_folder", lambda: tmp_path)
    assert messages_of_preparing(config, caplog, chosen) == []
    assert empty_model(config, chosen).kv_inner_order == "slot_dim"


def test_native_kernels_that_cannot_run_are_refused(config: ModelConfig) -> None:
    chosen = options("native", block_size=7)
    prepare_kernels(config, chosen)
    with pytest.raises(PdserveError, match="must be even") as caught:
        empty_model(config, chosen)
    assert caught.value.reason is ErrorReason.UNSUPPORTED
