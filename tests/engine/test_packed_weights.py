"""Packed weights: what was foreseen is what they take, and the loader's copies go layer by layer."""

import gc
from pathlib import Path

import pytest
import torch

from pdserve.core.model_files import open_model_files
from pdserve.engine.model import packed_weights
from pdserve.engine.model.native_decoder import NativeDecoderModel, NativeLimits
from pdserve.engine.paged_kv import TORCH_DTYPES
from pdserve.engine.weights import load_weights
from pdserve_kernels.cpu.team import make_team
from pdserve_kernels.host import why_not_here
from tests.support.tiny_models import FAMILIES, write_tiny, write_tiny_llama

pytestmark = pytest.mark.skipif(bool(why_not_here()), reason=f"native kernels cannot run: {why_not_here()}")


def empty_model(source: Path, dtype: str) -> NativeDecoderModel:
    config = open_model_files(source).config
    return NativeDecoderModel(config, TORCH_DTYPES[dtype], NativeLimits(64, 32), make_team(1))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_take_what_was_foreseen(tmp_path: Path, family: str, dtype: str, tied: bool) -> None:
    source = write_tiny(tmp_path / "tiny", family, tie_word_embeddings=tied, intermediate_size=72)
    model = empty_model(source, dtype)
    load_weights(open_model_files(source), model)
    assert model._weights is not None
    assert model._weights.num_unused_bytes == 0 < model.weight_bytes


def test_a_layer_is_let_go_once_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny_llama(tmp_path / "tiny")
    model = empty_model(source, "bfloat16")
    assert model._parameters is not None
    copies = {layer.down.weight.untyped_storage().data_ptr() for layer in model._parameters.layers}
    left: list[int] = []
    monkeypatch.setattr(packed_weights, "return_freed_memory", lambda: left.append(len(copies & held_storages())))
    load_weights(open_model_files(source), model)
    assert left == [1, 0]


def held_storages() -> set[int]:
    """Addresses of all storages that a living tensor uses."""
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
