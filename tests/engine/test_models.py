"""Every family and every kind of rotation against transformers: all positions, however the prompt is cut.

The pool is full of NaN, prompts are longer than windows and than original contexts, and cross a tile.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from pdserve.engine.block_table import BlockTable
from pdserve.engine.model.choice import KernelChoice
from pdserve.engine.model.interface import StepInput
from pdserve_kernels.host import why_not_here
from tests.support.engine_harness import build_engine, build_pool, load_model
from tests.support.oracle import build_oracle, oracle_logits
from tests.support.tiny_models import FAMILIES, write_tiny, write_tiny_packed

LENGTH, BLOCK = 150, 16
NATIVE = pytest.param("native", marks=pytest.mark.skipif(bool(why_not_here()), reason=why_not_here()))
KERNELS = pytest.mark.parametrize("kernels", [NATIVE, "torch"])
ORIGINAL = 40
"""The context before scaling, so that prompts cross it."""

MODELS = {name: (name, {}) for name in FAMILIES} | {
    "llama-untied": ("llama-biased", {"tie_word_embeddings": False}),
    "mistral-window-1": ("mistral", {"sliding_window": 1}),
    "gemma3-one-kv-head": ("gemma3", {"num_key_value_heads": 1, "head_dim": 64}),
}
"""A tiny model, and what its config says besides."""

ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
}
CUTS = pytest.mark.parametrize("chunks", [[LENGTH], [1], [7], [16], [64], [100, 1]], ids=str)
"""Sizes of a prompt's chunks; the last one goes on."""


class PagedModel:
    """A model with one sequence in a poisoned pool; its blocks lie in falling order."""

    def __init__(
        self, source: Path, dtype: str = "float32", num_blocks: int = 64, kernels: KernelChoice = "auto"
    ) -> None:
        self.model = load_model(source, dtype, BLOCK, kernels)
        self.pool = build_pool(self.model, dtype, num_blocks, BLOCK).pool.fill_(float("nan"))
        self.table = BlockTable()
        self.table.follow(list(range(num_blocks))[::-1])

    def logits(self, token_ids: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
        """Of every position, [tokens, vocab_size]."""
        rows = [self._run(token_ids[start:end], start) for start, end in spans(len(token_ids), chunks)]
        return torch.cat(rows)

    def _run(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        num = len(token_ids)
        ids, positions, lens, ends = (
            np.array(values, dtype=np.int32) for values in (token_ids, range(start, start + num), [num], [start + num])
        )
        self.model.forward(StepInput(ids, positions, lens, ends, [self.table], ids[:0]), self.pool)
        return torch.from_numpy(self.model.logits(np.arange(num, dtype=np.int32)).copy())


def spans(length: int, chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    start, sizes = 0, list(chunks)
    while start < length:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        yield start, min(start + size, length)
        start += size


def prompt(length: int = LENGTH) -> list[int]:
    return np.random.default_rng(length).integers(3, 300, length).tolist()


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module", params=MODELS)
def source(request, tmp_path_factory) -> Path:
    family, fields = MODELS[request.param]
    return write_tiny(tmp_path_factory.mktemp("models") / request.param, family, **fields)


@pytest.fixture(scope="module")
def expected(source) -> torch.Tensor:
    return oracle_logits(build_oracle(source), prompt())


@CUTS
@KERNELS
def test_a_family_equals_transformers(source, expected, chunks, kernels):
    assert_same(PagedModel(source, kernels=kernels).logits(prompt(), chunks), expected)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("window", [255, 256, 257, 599, 600, 10_000])
def test_windows_around_a_tile_and_a_prompt_equal_transformers(tmp_path, family, window):
    source = write_tiny(tmp_path / "tiny", family, sliding_window=window)
    expected = oracle_logits(build_oracle(source), prompt(600))
    assert_same(PagedModel(source).logits(prompt(600), [300, 256, 1]), expected)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("kind", ROPES)
def test_scaled_rotations_equal_transformers(tmp_path, family, kind):
    source = write_tiny(tmp_path / "tiny", family, rope_scaling=ROPES[kind])
    expected = oracle_logits(build_oracle(source), prompt())
    for chunks in ([LENGTH], [7], [100, 1]):
        assert_same(PagedModel(source).logits(prompt(), chunks), expected)


def test_factors_in_a_gguf_file_equal_transformers(tmp_path):
    source = write_tiny_packed(tmp_path / "tiny.gguf", "llama", rope_scaling=ROPES["llama3"])
    oracle = build_oracle(write_tiny(tmp_path / "tiny", "llama", rope_scaling=ROPES["llama3"]))
    assert_same(PagedModel(source).logits(prompt(), [64]), oracle_logits(oracle, prompt()))


def test_dynamic_rotation_equals_transformers_token_by_token(tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    source = write_tiny(tmp_path / "tiny", "llama", rope_scaling=scaling, max_position_embeddings=ORIGINAL)
    oracle, cache = build_oracle(source), DynamicCache()
    with torch.inference_mode():
        rows = [oracle(torch.tensor([[token_id]]), cache=cache).logits[0, 0] for token_id in prompt()]
    for chunks in ([LENGTH], [7], [100, 1]):
        assert_same(PagedModel(source).logits(prompt(), chunks), torch.stack(rows))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_chunks(source, dtype):
    whole, cut = PagedModel(source, dtype), PagedModel(source, dtype)
    expected = whole.logits(prompt(333), [333])
    assert torch.isfinite(expected).all()
    for chunks in ([7], [100, 1], [257, 16]):
        assert torch.equal(cut.logits(prompt(333), chunks), expected)
        assert torch.equal(cut.pool.view(torch.uint8), whole.pool.view(torch.uint8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["mistral", "qwen2-sliding", "gemma3"])
def test_bits_do_not_depend_on_neighbours(tmp_path, family, dtype):
    """A prompt in one chunk, then token by token; alone, and in chunks beside decode rows with windows of their own."""
    source = write_tiny(tmp_path / "tiny", family)
    alone, crowded = build_engine(source, dtype), build_engine(source, dtype)
    lonely, sequence = alone.sequence(prompt(290)), crowded.sequence(prompt(290))
    alone.prefill(lonely)
    neighbours = [crowded.sequence(prompt(length)) for length in (5, 23, 24, 25, 600)]
    for neighbour in neighbours:
        crowded.prefill(neighbour)
    while sequence.num_output_tokens < 9:
        size = min(64, sequence.num_remaining_tokens)
        logits = crowded.step(*((neighbour, 1) for neighbour in neighbours), (sequence, size))
    while lonely.num_output_tokens < 9:
        expected = alone.step((lonely, 1))
    np.testing.assert_array_equal(logits[-1], expected[-1])
    assert torch.equal(crowded.kv(sequence), alone.kv(lonely))
