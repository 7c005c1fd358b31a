"""The real model against transformers, on a handful of prompts; fleet-level tests have more."""

from pathlib import Path

import pytest
import torch

from pdserve.core.model_files import open_model_files
from pdserve.core.tokenizer import load_tokenizer
from tests.support.engine_harness import build_engine
from tests.support.oracle import build_oracle, oracle_greedy, oracle_logits

pytestmark = pytest.mark.model

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "<|im_start|>user\nWhat is the tallest mountain?<|im_end|>\n<|im_start|>assistant\n",
)
NUM_TOKENS = 24
MAX_GAP = 0.25


@pytest.fixture(scope="module")
def source(smollm2: Path) -> Path:
    return smollm2


@pytest.fixture(scope="module")
def prompts(source) -> list[list[int]]:
    tokenizer = load_tokenizer(open_model_files(source))
    return [tokenizer.encode(text) for text in PROMPTS]


def test_fp32_greedy_tokens_equal_transformers(source, prompts):
    oracle, engine = build_oracle(source), build_engine(source)
    for ids, chunk_size in zip(prompts, (None, 16, 5), strict=True):
        assert engine.generate(ids, NUM_TOKENS, chunk_size) == oracle_greedy(oracle, ids, NUM_TOKENS)


def test_bf16_greedy_tokens_differ_at_near_ties_only(source, prompts):
    """The oracle computes in fp32 on bf16-rounded weights."""
    oracle, engine = build_oracle(source, round_to=torch.bfloat16), build_engine(source, "bfloat16")
    for ids in prompts:
        ours, theirs = engine.generate(ids, NUM_TOKENS), oracle_greedy(oracle, ids, NUM_TOKENS)
        same = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if same is not None:
            logits = oracle_logits(oracle, ids + theirs[:same])[-1]
            assert logits[theirs[same]] - logits[ours[same]] <= MAX_GAP


def test_bits_of_the_real_model_do_not_depend_on_chunks(source, prompts):
    engine = build_engine(source, "bfloat16")
    ids = (prompts[2] * 8)[:130]
    whole, chunked = engine.sequence(ids), engine.sequence(ids)
    assert (engine.prefill(whole) == engine.prefill(chunked, 33)).all()
    assert torch.equal(engine.kv(whole), engine.kv(chunked))
