"""load_engine: one call from files to a runner."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_files import open_model_files
from pdserve.core.model_files.files import fingerprint
from pdserve.engine.loading import EngineConfig, load_engine
from pdserve.engine.memory import MemoryLimits
from pdserve.engine.memory_probe import resident_bytes
from pdserve.engine.model.decoder import DecoderModel
from pdserve.engine.paged_kv import TORCH_DTYPES
from pdserve.engine.weights import load_weights
from pdserve_kernels.torch_reference import TorchKernels
from tests.support.tiny_models import FAMILIES, write_tiny, write_tiny_llama


@pytest.fixture
def source(tmp_path):
    return write_tiny_llama(tmp_path / "tiny", context_length=128)


def test_a_loaded_engine_says_what_it_is(source):
    progress: list[tuple[int, int]] = []
    config = EngineConfig(source, "tiny", dtype="float32", block_size=8, memory=MemoryLimits(num_blocks=12))
    engine = load_engine(config, lambda done, total: progress.append((done, total)))
    info, layout = engine.model_info, engine.paged_kv.layout
    assert (info.name, info.architecture, info.dtype) == ("tiny", "LlamaForCausalLM", "float32")
    assert (info.vocab_size, info.context_length, info.eos_token_ids) == (300, 128, (2,))
    assert info.fingerprint == fingerprint(open_model_files(source), "float32")
    assert (layout.dtype, layout.block_size, layout.num_layers, layout.num_kv_heads) == ("float32", 8, 2, 2)
    assert engine.paged_kv.num_blocks == engine.plan.num_blocks == 12
    assert progress[-1][0] == progress[-1][1] > 0
    assert {"runtime", "weights", "KV cache", "workspace", "total"} <= engine.measured.keys()
    assert "holds 96 tokens" in engine.plan.warning


def held_bytes() -> int:
    """Bytes of all storages that a living tensor uses."""
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize(("dtype", "tied"), [("float32", True), ("bfloat16", False)])
@pytest.mark.parametrize("family", FAMILIES)
def test_torch_weights_are_predicted_exactly(tmp_path, family, dtype, tied):
    source = write_tiny(tmp_path / "tiny", family, tie_word_embeddings=tied)
    config = EngineConfig(source, "tiny", dtype=dtype, memory=MemoryLimits(num_blocks=1), kernels="torch")
    plan = load_engine(config).plan
    files = open_model_files(source)
    gc.collect()
    before = held_bytes()
    model = DecoderModel(files.config, TORCH_DTYPES[dtype], torch.device("cpu"), TorchKernels())
    load_weights(files, model)
    assert plan.needs.weights == held_bytes() - before > 0


_MEASURED_LOAD = """
import json, sys
from pathlib import Path
from pdserve.engine import loading
from pdserve.engine.memory import MemoryLimits

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

loading.resident_bytes = lambda device: status("RssAnon")
limits = MemoryLimits(num_blocks=4)
loaded = loading.load_engine(loading.EngineConfig(Path(sys.argv[1]), "real", memory=limits, kernels=sys.argv[2]))
needs = loaded.plan.needs
print(json.dumps([status("VmHWM") - status("RssFile"), dict(loaded.measured), needs.weights, needs.workspace]))
"""


@pytest.mark.model
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_real_models_memory_is_as_predicted_and_its_peak_bounded(smollm2, kernels):
    """Without the pages of libraries: how many of them are mapped is up to the kernel and its file cache."""
    command = [sys.executable, "-c", _MEASURED_LOAD, str(smollm2), kernels]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, measured, weights, workspace = json.loads(done.stdout)
    config = open_model_files(smollm2).config
    largest = 2 * config.vocab_size * config.hidden_size
    assert -(8 << 20) < measured["weights"] - weights < 16 << 20
    assert measured["workspace"] < workspace
    assert peak < measured["runtime"] + weights + largest + (32 << 20)


def test_no_warning_where_long_requests_fit(source):
    engine = load_engine(EngineConfig(source, "tiny", dtype="float32", memory=MemoryLimits(num_blocks=64)))
    assert not engine.plan.warning


def test_the_budget_decides_the_number_of_blocks(source):
    budget = resident_bytes(torch.device("cpu")) + (400 << 20)
    engine = load_engine(EngineConfig(source, "tiny", memory=MemoryLimits(budget, headroom_fraction=0.0)))
    assert budget - engine.paged_kv.layout.block_bytes < engine.plan.total <= budget
    assert engine.paged_kv.num_blocks == engine.plan.num_blocks > 1000


@pytest.mark.parametrize(
    ("fields", "reason", "name"),
    [
        ({"memory": MemoryLimits(budget_bytes=1 << 20)}, ErrorReason.INVALID_ARGUMENT, "budget"),
        ({"dtype": "int4"}, ErrorReason.UNSUPPORTED, "int4"),
        ({"device": "cuda"}, ErrorReason.UNSUPPORTED, "cuda"),
    ],
)
def test_impossible_wishes_are_refused_by_name(source, monkeypatch, fields, reason, name):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(PdserveError) as caught:
        load_engine(EngineConfig(source, "tiny", **fields))
    assert caught.value.reason is reason
    assert name in caught.value.message
