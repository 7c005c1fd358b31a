"""Logprobs of prompts: right, the same bits however a prompt is cut and batched, bounded in memory, NaN noticed."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from pdserve.core.sampling import SamplingParams, TokenLogprobs
from pdserve.engine import runner as runner_module
from pdserve.engine.sequence import Chunk, ChunkResult, Sampled, Sequence
from tests.support.engine_harness import GREEDY, Engine, build_engine
from tests.support.oracle import build_oracle, oracle_logits
from tests.support.tiny_models import write_tiny_llama

ECHO = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True, num_logprobs=3, num_prompt_logprobs=3)
PROMPT = np.random.default_rng(5).integers(3, 300, 150).tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request, checkpoint) -> Engine:
    return build_engine(checkpoint, request.param)


@pytest.fixture(scope="module")
def whole(engine: Engine) -> list[TokenLogprobs]:
    return scores(engine, [len(PROMPT)])


def scores(engine: Engine, cuts: list[int], neighbours: int = 0) -> list[TokenLogprobs]:
    """Of PROMPT, computed in chunks of the sizes `cuts` (the last one again and again) beside other sequences."""
    engine.next_block = 1
    others = [engine.sequence([7 + n] * 5, room=200) for n in range(neighbours)]
    for other in others:
        engine.prefill(other)
    sequence, found = engine.sequence(PROMPT, ECHO), []
    sizes = iter(cuts)
    while sequence.num_remaining_tokens > 0 and sequence.num_output_tokens == 0:
        size = min(next(sizes, cuts[-1]), sequence.num_remaining_tokens)
        engine.step(*((other, 1) for other in others), (sequence, size))
        found += engine.results[-1].prompt_logprobs
    return found


def test_they_are_those_of_transformers(checkpoint):
    found = scores(build_engine(checkpoint), [64])
    exact = torch.log_softmax(oracle_logits(build_oracle(checkpoint), PROMPT), dim=-1)
    assert len(found) == len(PROMPT) - 1
    for position, entry in enumerate(found):
        row = exact[position]
        assert entry.logprob == pytest.approx(float(row[PROMPT[position + 1]]), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


@settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(cuts=st.lists(st.integers(7, 60), min_size=1, max_size=6), neighbours=st.integers(0, 3))
@example(cuts=[1], neighbours=2)
@example(cuts=[33], neighbours=1)
def test_bits_depend_on_neither_chunks_nor_neighbours(engine, whole, cuts, neighbours):
    assert scores(engine, cuts, neighbours) == whole


def test_a_prompt_scores_an_output_as_decoding_did(engine):
    engine.next_block = 1
    decoded = engine.sequence(PROMPT[:20], ECHO)
    engine.prefill(decoded)
    told = [engine.results[0].sampled.logprobs]
    while decoded.num_output_tokens < 12:
        engine.step((decoded, 1))
        told.append(engine.results[0].sampled.logprobs)
    again = engine.sequence(decoded.token_ids, ECHO)
    engine.step((again, again.num_tokens))
    assert list(engine.results[0].prompt_logprobs[-12:]) == told


def test_a_recovered_sequence_keeps_the_prompts_boundary(engine, whole):
    engine.next_block = 1
    recovered = engine.sequence(PROMPT, ECHO)
    recovered.num_prompt_tokens = 100
    engine.step((recovered, 90))
    first = engine.results[0].prompt_logprobs
    engine.step((recovered, 60))
    assert list(first + engine.results[0].prompt_logprobs) == whole[:99]


def test_memory_does_not_grow_with_the_chunk(engine):
    rows = engine.model.num_rows
    rows.clear()
    scores(engine, [len(PROMPT)])
    assert max(rows) <= 64
    rows.clear()
    engine.next_block = 1
    engine.step((engine.sequence(PROMPT, GREEDY), len(PROMPT)))
    assert len(rows) == 1, "rows that nobody asked for were scored"


def test_one_prompt_token_has_nothing_to_score(engine):
    engine.next_block = 1
    engine.step((engine.sequence([5], ECHO), 1))
    assert engine.results[0].prompt_logprobs == ()
    assert engine.results[0].sampled.token_id is not None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 15, 39])
def test_a_bad_row_of_the_prompt_ends_it_and_leaves_its_neighbour(engine, monkeypatch, bad, row):
    """FIELD_CASES G01: at any prompt row, also in a chunk that does not sample."""
    engine.next_block = 1
    neighbour, spoilt = engine.sequence(PROMPT[:30], ECHO), engine.sequence(PROMPT, ECHO)
    chunks = [Chunk(neighbour, 30, sample=True), Chunk(spoilt, 40, sample=False)]
    healthy, _ = engine.runner.run(chunks)

    def spoil(logits: np.ndarray, rows: list[int]) -> None:
        if 30 + row in rows:
            logits[rows.index(30 + row), 17] = bad

    monkeypatch.setattr(engine.model, "alter", spoil)
    assert engine.runner.run(chunks) == [healthy, ChunkResult(Sampled(None))]


def test_minus_infinity_is_a_logprob_like_any_other(engine, monkeypatch):
    engine.next_block = 1
    sequence = engine.sequence(PROMPT[:4], ECHO)

    def forbid(logits: np.ndarray, _rows: list[int]) -> None:
        logits[:, PROMPT[2]] = -math.inf

    monkeypatch.setattr(engine.model, "alter", forbid)
    (result,) = engine.runner.run([Chunk(sequence, 4, sample=True)])
    assert result.prompt_logprobs[1].logprob == -math.inf
    assert math.isfinite(result.prompt_logprobs[0].logprob)


def test_slabs_are_padded_for_equal_bits(checkpoint, monkeypatch):
    """Slabs of one row and of many give the same bits."""
    engine = build_engine(checkpoint, "bfloat16")
    expected = scores(engine, [len(PROMPT)])
    monkeypatch.setattr(runner_module, "SCORED_ROWS", 1)
    assert scores(engine, [len(PROMPT)]) == expected


def test_each_sequence_gets_the_number_it_asked_for(engine):
    engine.next_block = 1
    wants: list[Sequence] = [
        engine.sequence(PROMPT[:9], replace(ECHO, num_prompt_logprobs=asked)) for asked in (None, 0, 20)
    ]
    engine.step(*((sequence, 9) for sequence in wants))
    lengths = [[len(entry.top) for entry in result.prompt_logprobs] for result in engine.results]
    assert lengths == [[], [0] * 8, [20] * 8]
