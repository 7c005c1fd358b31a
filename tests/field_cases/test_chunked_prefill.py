"""G03: whatever the chunk, whatever lay in the pool before, and however often: the same logits, and the right ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.engine_harness import Engine, build_engine
from tests.support.oracle import build_oracle, oracle_greedy, oracle_logits
from tests.support.tiny_models import write_tiny_llama

CASES = [(chunk, length) for chunk in (16, 64, 512) for length in (chunk - 1, chunk, chunk + 1, 3 * chunk + 7)]
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def prompt(length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(length).integers(3, 300, length)]


def poison(engine: Engine) -> None:
    engine.paged_kv.pool.fill_(float("nan"))


def prefill(
    checkpoint: Path, dtype: str, length: int, chunk: int | None, prepare: Callable[[Engine], None] = lambda _: None
) -> tuple[np.ndarray, list[int]]:
    """Logits of the last prompt position, and the greedy tokens from there on."""
    engine = build_engine(checkpoint, dtype)
    prepare(engine)
    sequence = engine.sequence(prompt(length), room=NUM_TOKENS)
    logits = engine.prefill(sequence, chunk)
    while sequence.num_output_tokens < NUM_TOKENS:
        engine.step((sequence, 1))
    return logits, sequence.token_ids[length:]


@pytest.mark.parametrize(("chunk", "length"), CASES)
def test_chunks_change_nothing_in_fp32(checkpoint: Path, chunk: int, length: int) -> None:
    oracle = build_oracle(checkpoint)
    whole, tokens = prefill(checkpoint, "float32", length, None)
    np.testing.assert_allclose(whole, oracle_logits(oracle, prompt(length))[-1], atol=1e-3)
    assert tokens == oracle_greedy(oracle, prompt(length), NUM_TOKENS)
    for _ in range(2):
        logits, again = prefill(checkpoint, "float32", length, chunk, poison)
        np.testing.assert_array_equal(logits, whole)
        assert again == tokens


@pytest.mark.parametrize(("chunk", "length"), CASES)
def test_chunks_change_nothing_in_bf16(checkpoint: Path, chunk: int, length: int) -> None:
    whole, tokens = prefill(checkpoint, "bfloat16", length, None)
    for _ in range(2):
        logits, again = prefill(checkpoint, "bfloat16", length, chunk, poison)
        np.testing.assert_array_equal(logits, whole)
        assert again == tokens


def test_bf16_is_no_further_from_fp32_than_transformers_in_bf16(checkpoint: Path) -> None:
    """Over all lengths together: of a single one, chance decides."""
    exact = build_oracle(checkpoint)
    rival = build_oracle(checkpoint, round_to=torch.bfloat16, compute=torch.bfloat16)
    ours, theirs = [], []
    for length in sorted({length for _, length in CASES}):
        truth = oracle_logits(exact, prompt(length))[-1].numpy()
        ours.append(np.abs(prefill(checkpoint, "bfloat16", length, 64)[0] - truth).max())
        theirs.append(np.abs(oracle_logits(rival, prompt(length))[-1].numpy() - truth).max())
    assert np.mean(ours) <= np.mean(theirs)
