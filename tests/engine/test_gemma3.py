"""Gemma 3 270M as published, quantised, against transformers in fp32 on the same weights and token ids."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from pdserve.core.model_files import open_model_files
from pdserve.core.tokenizer import load_tokenizer
from tests.support.engine_harness import Engine, build_engine
from tests.support.oracle import build_oracle, greedy_after

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_TOKENS = 32
ROOT = Path(__file__).parents[2]
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "<start_of_turn>user\nWhat is the tallest mountain?<end_of_turn>\n<start_of_turn>model\n",
    "Die Hauptstadt von Österreich ist",
    "東京は",
    "1, 1, 2, 3, 5, 8,",
)
LENGTHS = (255, 512, 700, 1200)
"""Prompts cut from a longer text; the window of most layers is 512."""
CHUNKS = (None, 1, 7, 16, 64, 5, 100, 512, 300, 256)


@pytest.fixture(scope="module")
def prompts(gemma3: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(open_model_files(gemma3))
    text = tokenizer.encode((ROOT / "LICENSE").read_text())
    return [tokenizer.encode(text) for text in TEXTS] + [text[:length] for length in LENGTHS]


@pytest.fixture(scope="module")
def oracle(gemma3: Path) -> PreTrainedModel:
    return build_oracle(gemma3)


@pytest.fixture(scope="module")
def engine(gemma3: Path) -> Engine:
    engine = build_engine(gemma3)
    engine.paged_kv.pool.fill_(float("nan"))
    return engine


def test_greedy_tokens_equal_transformers(engine: Engine, oracle: PreTrainedModel, prompts: list[list[int]]) -> None:
    for prompt, chunk_size in zip(prompts, CHUNKS, strict=True):
        output = engine.generate(prompt, NUM_TOKENS, chunk_size)
        assert output == greedy_after(oracle, prompt, output), f"prompt of {len(prompt)} tokens"


def test_logits_equal_transformers(engine: Engine, oracle: PreTrainedModel, prompts: list[list[int]]) -> None:
    logits = engine.prefill(engine.sequence(prompts[-1]), 500)
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompts[-1]]), logits_to_keep=1).logits[0, 0]
    np.testing.assert_allclose(logits, expected, atol=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_chunks(gemma3: Path, prompts: list[list[int]], dtype: str) -> None:
    engine = build_engine(gemma3, dtype)
    whole, chunked = engine.sequence(prompts[-2]), engine.sequence(prompts[-2])
    assert (engine.prefill(whole) == engine.prefill(chunked, 33)).all()
    assert torch.equal(engine.kv(whole), engine.kv(chunked))
