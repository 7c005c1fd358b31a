"""Loading: every parameter exactly once, or a failure that names what is wrong (FIELD_CASES L01, L02)."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_files import open_model_files
from pdserve.engine.model.decoder import DecoderModel
from pdserve.engine.weights import load_weights
from pdserve_kernels.torch_reference import TorchKernels
from tests.support.engine_harness import build_engine
from tests.support.oracle import build_oracle, oracle_logits
from tests.support.tiny_models import FAMILIES, TinyLlama, family_tensors, write_tiny, write_tiny_gguf, write_tiny_llama

INDEX = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
NORM = "model.layers.1.input_layernorm.weight"
IDS = [5, 9, 70, 6, 212]


def shard(directory: Path) -> Path:
    """Split model.safetensors into two shards and an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"part-1.safetensors": names[::2], "part-2.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, directory / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return directory


def change_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) drop tensors; names have '__' for '.'."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in changes.items():
        tensors[name.replace("__", ".")] = tensor
    save_file({k: v for k, v in tensors.items() if v is not None}, directory / "model.safetensors")


def set_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def empty_model(source: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    return DecoderModel(open_model_files(source).config, dtype, torch.device("cpu"), TorchKernels())


def refusal(source: Path) -> PdserveError:
    with pytest.raises(PdserveError) as caught:
        load_weights(open_model_files(source), empty_model(source))
    return caught.value


def last_logits(source: Path) -> np.ndarray:
    engine = build_engine(source, num_blocks=16)
    return engine.prefill(engine.sequence(IDS))


@pytest.fixture
def directory(tmp_path):
    return write_tiny_llama(tmp_path / "tiny")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_what_the_file_says(tmp_path, family, dtype):
    """Gemma's norms one more; norms always in fp32."""
    source = write_tiny(tmp_path / "tiny", family, num_shards=2)
    model = empty_model(source, dtype)
    for tensor in model.destinations().values():
        tensor.fill_(float("nan"))
    load_weights(open_model_files(source), model)
    expected = family_tensors(FAMILIES[family])
    assert model.destinations().keys() == expected.keys()
    for name, tensor in model.destinations().items():
        is_norm = name.endswith("norm.weight")
        stored = expected[name] + 1.0 if is_norm and family == "gemma3" else expected[name]
        assert tensor.dtype is (torch.float32 if is_norm else dtype)
        assert torch.equal(tensor, stored.to(tensor.dtype)), name


def test_one_is_added_in_fp32_to_norms_stored_in_bf16(tmp_path):
    source = write_tiny(tmp_path / "tiny", "gemma3")
    stored = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(stored, source / "model.safetensors")
    model = empty_model(source, torch.bfloat16)
    load_weights(open_model_files(source), model)
    assert torch.equal(model.destinations()[NORM], stored[NORM].float() + 1.0)


def test_a_parameter_written_twice_is_refused(directory, monkeypatch):
    files = open_model_files(directory)
    twice = [*files.stored_tensors(), files.stored_tensors()[3]]
    monkeypatch.setattr(files, "stored_tensors", lambda: twice)
    with pytest.raises(PdserveError, match="comes twice"):
        load_weights(files, empty_model(directory))


def test_progress_ends_at_the_total(directory):
    seen: list[tuple[int, int]] = []
    load_weights(open_model_files(directory), empty_model(directory), lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == seen[-1][1] == sum(t.nbytes for t in TinyLlama().tensors().values())


def test_missing_shard_is_named(directory):
    (shard(directory) / "part-2.safetensors").unlink()
    assert "part-2.safetensors" in refusal(directory).message


def test_truncated_shard_is_named(directory):
    path = shard(directory) / "part-1.safetensors"
    for size in (path.stat().st_size - 1, 100, 4, 0):
        path.write_bytes(path.read_bytes()[:size])
        assert "part-1.safetensors" in refusal(directory).message


def test_missing_file_is_named(directory):
    (directory / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(directory).message


def test_stray_files_are_ignored(directory):
    shard(directory)
    before = last_logits(directory)
    save_file({EMBEDDING: torch.zeros(300, 64)}, directory / "adapter.safetensors")
    save_file({EMBEDDING: torch.zeros(300, 64)}, directory / "model.safetensors")
    np.testing.assert_array_equal(last_logits(directory), before)


def test_index_that_names_a_tensor_twice_is_refused(directory):
    path = shard(directory) / INDEX
    path.write_text(path.read_text().replace('{"weight_map": {', f'{{"weight_map": {{"{NORM}": "part-1.safetensors", '))
    assert NORM in refusal(directory).message


def test_index_that_omits_or_misplaces_a_tensor_is_refused(directory):
    path = shard(directory) / INDEX
    index = json.loads(path.read_text())
    file = index["weight_map"].pop(NORM)
    path.write_text(json.dumps(index))
    assert NORM in refusal(directory).message
    index["weight_map"][NORM] = {"part-1.safetensors": "part-2.safetensors"}.get(file, "part-1.safetensors")
    path.write_text(json.dumps(index))
    assert NORM in refusal(directory).message


def test_index_that_leaves_the_directory_is_refused(directory):
    path = shard(directory) / INDEX
    path.write_text(path.read_text().replace('"part-1', '"../part-1'))
    assert "outside" in refusal(directory).message


def test_missing_tensor_and_wrong_shape_are_named(directory):
    change_tensors(directory, model__layers__1__input_layernorm__weight=torch.ones(63))
    assert NORM in refusal(directory).message
    change_tensors(directory, model__layers__1__input_layernorm__weight=None)
    assert NORM in refusal(directory).message


def test_unexpected_tensors_are_listed(directory, caplog):
    change_tensors(directory, model__extra=torch.ones(2))
    with caplog.at_level(logging.WARNING):
        load_weights(open_model_files(directory), empty_model(directory))
    assert "model.extra" in caplog.text


def test_unknown_dtypes_are_refused_by_name(directory, tmp_path):
    change_tensors(directory, model__norm__weight=torch.ones(64, dtype=torch.int8))
    error = refusal(directory)
    assert (error.reason, "I8" in error.message) == (ErrorReason.UNSUPPORTED, True)
    source = write_tiny_gguf(tmp_path / "tiny.gguf", "TQ2_0", hidden_size=256, head_dim=64, intermediate_size=256)
    error = refusal(source)
    assert (error.reason, "TQ2_0" in error.message) == (ErrorReason.UNSUPPORTED, True)


@pytest.mark.parametrize("family", ["llama-biased", "qwen2", "gemma3"])
def test_tied_without_head_shares_storage_and_equals_the_reference(tmp_path, family):
    """Gemma's configs need not say that they tie."""
    source = write_tiny(tmp_path / "tiny", family)
    assert HEAD not in empty_model(source).destinations()
    np.testing.assert_allclose(last_logits(source), oracle_logits(build_oracle(source), IDS)[-1], atol=1e-4)


def test_tied_with_a_stored_head_uses_the_embeddings_and_says_if_they_differ(directory, caplog):
    before = last_logits(directory)
    change_tensors(directory, lm_head__weight=TinyLlama().tensors()[EMBEDDING])
    np.testing.assert_array_equal(last_logits(directory), before)
    assert "differs" not in caplog.text
    change_tensors(directory, lm_head__weight=torch.zeros(300, 64))
    np.testing.assert_array_equal(last_logits(directory), before)
    assert "differs" in caplog.text


@pytest.mark.parametrize("family", ["llama-biased", "qwen2", "gemma3"])
def test_untied_without_head_is_refused(tmp_path, family):
    source = write_tiny(tmp_path / "tiny", family)
    set_config(source, tie_word_embeddings=False)
    assert HEAD in refusal(source).message


def test_forward_needs_weights(directory):
    model = empty_model(directory)
    with pytest.raises(RuntimeError, match="freeze"):
        model.forward(None, None)
