"""Rotary tables against transformers' (FIELD_CASES G04): every kind of scaling, at the positions where they part."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pdserve.core.model_files.config import RopeConfig
from pdserve.engine.model.rope import rope_table

CASES = {
    "default": ({"rope_type": "default"}, {}),
    "linear": ({"rope_type": "linear", "factor": 4.0}, {"factor": 4.0}),
    "dynamic": ({"rope_type": "dynamic", "factor": 3.0}, {"factor": 3.0}),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "yarn": ({"rope_type": "yarn", "factor": 4.0}, {"factor": 4.0, "attention_factor": 1.1386294361119891}),
    "yarn-tuned": (
        {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.7},
        {"factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.7},
    ),
    "yarn-whole": (
        {"rope_type": "yarn", "factor": 4.0, "truncate": False, "attention_factor": 1.0},
        {"factor": 4.0, "truncate": False},
    ),
}
SCALES = pytest.mark.parametrize(("theta", "original", "head_dim"), [(1e4, 64, 16), (1e6, 4096, 128), (5e5, 8192, 64)])


def reference(scaling: dict, theta: float, original: int, head_dim: int, position: int) -> torch.Tensor:
    """cos and sin [2, head_dim / 2] as transformers has them for the last position of position + 1."""
    parameters = {**scaling, "rope_theta": theta}
    if scaling["rope_type"] in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = original
    length = original if scaling["rope_type"] == "dynamic" else 4 * original
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=length, rope_parameters=parameters)
    rotary = LlamaRotaryEmbedding(config)
    return torch.stack([x[0, 0, : head_dim // 2] for x in rotary(torch.zeros(1), torch.tensor([[position]]))])


@SCALES
@pytest.mark.parametrize("name", CASES)
def test_tables_equal_transformers(name, theta, original, head_dim):
    scaling, fields = CASES[name]
    rope = RopeConfig(theta, kind=scaling["rope_type"], original_context_length=original, **fields)
    table = rope_table(rope, head_dim, 2 * original + 1)
    positions = [0, 1, 1000, original - 1, original, 2 * original]
    for position in (p for p in positions if p <= 2 * original):
        ours = torch.stack(table.rows(torch.tensor([position]))).squeeze(1)
        expected = reference(scaling, theta, original, head_dim, position)
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0, msg=lambda m, p=position: f"position {p}: {m}")


def test_stored_factors_divide_the_frequencies():
    factors = torch.tensor([1.0, 1.5, 4.0, 8.0])
    table = rope_table(RopeConfig(1e4, kind="factors"), 8, 100, factors)
    frequencies = 1e4 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8) / factors
    angles = torch.arange(100, dtype=torch.float64).unsqueeze(1) * frequencies
    torch.testing.assert_close(table.cos.double(), angles.cos(), atol=1e-5, rtol=0)
    torch.testing.assert_close(table.sin.double(), angles.sin(), atol=1e-5, rtol=0)


def test_dynamic_rotates_a_position_by_the_length_that_ends_with_it():
    rope = RopeConfig(1e4, kind="dynamic", factor=2.0, original_context_length=50)
    plain = rope_table(RopeConfig(1e4), 16, 200)
    table = rope_table(rope, 16, 200)
    assert torch.equal(table.cos[:50], plain.cos[:50])
    assert not torch.allclose(table.cos[50:, 1:], plain.cos[50:, 1:], atol=1e-3)
    for position in (50, 137):
        theta = 1e4 * (2.0 * (position + 1) / 50 - 1.0) ** (16 / 14)
        expected = rope_table(RopeConfig(theta), 16, 200)
        torch.testing.assert_close(table.sin[position], expected.sin[position], atol=1e-4, rtol=0)


def test_factors_cannot_be_missing():
    with pytest.raises(ValueError, match="factors"):
        rope_table(RopeConfig(1e4, kind="factors"), 8, 4)
