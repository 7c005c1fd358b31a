"""Evaluation ids: fixed for ever, different where results may differ, equal where they may not."""

from dataclasses import replace

import pytest

from pdserve.core.model_info import KvLayout
from pdserve.engine.evaluation import evaluation_id
from pdserve.engine.loading import EngineConfig, load_engine
from pdserve.engine.memory import MemoryLimits

LAYOUT = KvLayout("bfloat16", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)
ID = "bf16/cpu-1/87cdc1ab0b19f83e"


def test_it_is_what_earlier_releases_said():
    assert evaluation_id("f00d", "bfloat16", LAYOUT, "cpu-1") == ID
    assert evaluation_id("f00d", "float32", replace(LAYOUT, dtype="float32"), "torch-1").startswith("fp32/torch-1/")


@pytest.mark.parametrize("change", [{"block_size": 32}, {"inner_order": "dim_slot"}, {"head_shard_rank": 1}])
def test_what_changes_no_result_changes_no_id(change):
    assert evaluation_id("f00d", "bfloat16", replace(LAYOUT, **change), "cpu-1") == ID


def test_what_changes_results_changes_the_id():
    ids = [
        evaluation_id("f00d", "bfloat16", LAYOUT, "cpu-1"),
        evaluation_id("feed", "bfloat16", LAYOUT, "cpu-1"),
        evaluation_id("f00d", "float16", LAYOUT, "cpu-1"),
        evaluation_id("f00d", "bfloat16", LAYOUT, "cpu-2"),
        evaluation_id("f00d", "bfloat16", replace(LAYOUT, dtype="float32"), "cpu-1"),
        evaluation_id("f00d", "bfloat16", replace(LAYOUT, scale_layout="per_head"), "cpu-1"),
        evaluation_id("f00d", "bfloat16", replace(LAYOUT, head_shard_size=3), "cpu-1"),
    ]
    assert len(set(ids)) == len(ids)


def test_a_loaded_engine_tells_its_own(tiny_model):
    loaded = load_engine(EngineConfig(tiny_model, "tiny", memory=MemoryLimits(num_blocks=8)))
    info = loaded.model_info
    assert info.evaluation_id.startswith("bf16/")
    numerics_version = info.evaluation_id.removeprefix("bf16/").rpartition("/")[0]
    assert info.evaluation_id == evaluation_id(info.fingerprint, "bfloat16", loaded.paged_kv.layout, numerics_version)
