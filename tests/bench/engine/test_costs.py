"""The least that a model must read and compute."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.core.model_files import ModelConfig, open_model_files
from pdserve.core.model_files.config import AttentionConfig, RopeConfig
from pdserve.engine.model.parameters import DecoderParameters
from pdserve_bench.engine.costs import ModelCosts
from tests.support.tiny_models import FAMILIES, write_tiny

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rms_norm_eps=1e-5,
    attention=(AttentionConfig(RopeConfig(1e5)),) * 30,
    attention_scale=0.125,
    context_length=8192,
    tie_word_embeddings=True,
    eos_token_ids=(2,),
    stored_dtype="Q4_1",
)


def test_the_default_model_has_its_known_costs() -> None:
    costs = ModelCosts(SMOLLM2, "bfloat16")
    assert round(costs.weight_bytes / 1e6) == 269
    assert costs.kv_bytes(1) == 23_040
    assert round((costs.prefill_flops(2) - costs.prefill_flops(1)) / 1e6) == 212
    assert costs.decode_bytes(8, 512) == costs.weight_bytes + 8 * 512 * 23_040
    assert ModelCosts(SMOLLM2, "float32").decode_bytes(8, 512) == 2 * costs.decode_bytes(8, 512)


def test_the_head_multiplies_one_row_of_a_prompt() -> None:
    costs = ModelCosts(SMOLLM2, "bfloat16")
    per_token = costs.prefill_flops(2) - costs.prefill_flops(1)
    assert costs.prefill_flops(1) == per_token + 2 * 49152 * 576


def test_a_window_bounds_what_a_layer_reads() -> None:
    windowed = replace(SMOLLM2, attention=(AttentionConfig(RopeConfig(1e5), 100),) * 10 + SMOLLM2.attention[:20])
    costs = ModelCosts(windowed, "bfloat16")
    assert costs.kv_bytes(100) == 100 * 23_040
    assert costs.kv_bytes(400) == (10 * 100 + 20 * 400) * 23_040 // 30


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_the_engine_is_counted(tmp_path: Path, family: str) -> None:
    config = open_model_files(write_tiny(tmp_path / "m", family)).config
    parameters = DecoderParameters(config, torch.bfloat16, torch.device("meta")).destinations().values()
    matrices = sum(tensor.nbytes for tensor in parameters if tensor.ndim == 2)
    assert ModelCosts(config, "bfloat16").resident_weight_bytes == matrices
