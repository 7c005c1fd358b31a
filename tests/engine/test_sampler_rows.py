"""`sample_rows` against the plain reference, row by row: any mix of options, ties, NaN and infinities, in any order."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.ids import SequenceId
from pdserve.core.sampling import SamplingParams
from pdserve.engine import sampler
from pdserve.engine.sampler import raw_logprobs, sample_rows
from pdserve.engine.sequence import Sampled, Sequence
from tests.support import reference_sampler

EOS = frozenset({2, 5})
SEEDS = st.integers(0, 2**32 - 1)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


@st.composite
def sampling(draw):
    """About a third plainly greedy; every option is off as often as on."""
    temperature = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7, 50.0]))
    if temperature == 0 and draw(st.booleans()):
        return GREEDY
    return SamplingParams(
        max_tokens=9,
        temperature=temperature,
        top_k=draw(st.sampled_from([0, 0, 0, 1, 40, 600, 9000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.99, 0.9, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-4, 0.1, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.25])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.7])),
        logit_bias=draw(st.dictionaries(st.integers(0, 70), st.sampled_from([-100.0, 1.5, 100.0]), max_size=2)),
        min_tokens=draw(st.sampled_from([0, 0, 4])),
        seed=draw(st.integers(0, 2**64 - 1)),
        choice=draw(st.integers(0, 3)),
        stop_token_ids=draw(st.frozensets(st.integers(0, 70), max_size=2)),
        ignore_eos=draw(st.booleans()),
        num_logprobs=draw(st.sampled_from([None, None, 0, 5, 20])),
    )


def a_row(kind: str, seed: int, size: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = random.normal(0, 4, size).astype(np.float32)
    if kind == "ties":
        values = np.round(values)
    if kind == "one value":
        values[:] = 1.5
    if kind == "masked":
        values[random.random(size) < 0.9] = -math.inf
    if kind == "nothing":
        values[:] = -math.inf
    if kind in ("NaN", "+inf and NaN"):
        values[random.integers(size)] = math.nan
    if kind in ("+inf", "+inf and NaN"):
        values[random.integers(size)] = math.inf
    return values


KINDS = st.sampled_from(["any", "any", "ties", "one value", "masked", "nothing", "NaN", "+inf", "+inf and NaN"])


@st.composite
def batches(draw):
    size = draw(st.sampled_from([1, 12, 71, 600, 1500, 4099]))
    num_rows = draw(st.integers(0, 6))
    logits = np.stack([a_row(draw(KINDS), draw(SEEDS), size) for _ in range(num_rows)] or [np.empty(size, np.float32)])
    sequences = []
    for number in range(num_rows):
        token_ids = draw(st.lists(st.integers(0, min(size, 8) - 1), min_size=1, max_size=9))
        num_prompt = draw(st.integers(1, len(token_ids)))
        sequences.append(Sequence(SequenceId(number, 0), token_ids, num_prompt, draw(sampling())))
    return logits[:num_rows], sequences, draw(st.permutations(range(num_rows)))


def reference(row: np.ndarray, sequence: Sequence) -> Sampled:
    return reference_sampler.sample(row, sequence.sampling, sequence.token_ids, sequence.num_prompt_tokens, EOS)


@settings(max_examples=300, deadline=None)
@given(batches())
def test_rows_equal_the_reference_whatever_lies_beside_them(batch):
    logits, sequences, order = batch
    before = logits.copy()
    found = sample_rows(logits, sequences, EOS)
    assert found == [reference(row, sequence) for row, sequence in zip(logits, sequences, strict=True)]
    np.testing.assert_array_equal(logits, before)
    permuted = sample_rows(logits[list(order)], [sequences[i] for i in order], EOS)
    assert permuted == [found[i] for i in order]


@settings(deadline=None)
@given(SEEDS, st.sampled_from([1, 12, 600, 4099]), st.integers(1, 5), st.sampled_from([0, 1, 20, 5000]))
def test_logprobs_of_many_rows_equal_the_reference(seed, size, num_rows, num_top):
    logits = np.stack([a_row("ties" if seed % 2 else "masked", seed + i, size) for i in range(num_rows)])
    logits[:, 0] = 3.0
    token_ids = [0] * num_rows
    assert raw_logprobs(logits, token_ids, num_top) == reference_sampler.raw_logprobs(logits, token_ids, num_top)


def test_penalties_count_a_long_history_as_the_reference_does():
    logits = np.random.default_rng(1).normal(0, 4, (4, 600)).astype(np.float32)
    token_ids = np.random.default_rng(2).integers(0, 600, 900).tolist()
    for fields in ({"frequency_penalty": 0.3}, {"presence_penalty": -1.0}, {"repetition_penalty": 1.2}):
        params = SamplingParams(max_tokens=9, **fields)
        for row in logits:
            found = sampler.adjust(row, params, token_ids, 100, ())
            np.testing.assert_array_equal(found, reference_sampler.adjust(row, params, token_ids, 100, ()))


def sequences_of(*params: SamplingParams) -> list[Sequence]:
    return [Sequence(SequenceId(i, 0), [0], 1, chosen) for i, chosen in enumerate(params)]


def test_plainly_greedy_rows_are_taken_together(monkeypatch):
    logits = np.array([[1, 3, 3], [4, 1, math.nan], [0, 5, math.inf], [-math.inf] * 3, [0, -1, -2]], dtype=np.float32)
    monkeypatch.setattr(sampler, "sample", None)
    found = sample_rows(logits, sequences_of(*[GREEDY] * 5), EOS)
    assert [sampled.token_id for sampled in found] == [1, None, None, None, 0]


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {1: 9.0}},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 9.0},
        {"min_tokens": 1},
        {"num_logprobs": 0},
        {"temperature": 1.0},
    ],
)
def test_a_row_with_an_option_is_not_plainly_greedy(monkeypatch, fields):
    asked = SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **fields})
    monkeypatch.setattr(sampler, "sample", lambda *_: "by itself")
    logits = np.array([[2, 1, 0], [2, 1, 0]], dtype=np.float32)
    assert sample_rows(logits, sequences_of(asked, GREEDY), EOS) == ["by itself", Sampled(0)]


def test_every_row_needs_its_sequence():
    with pytest.raises(ValueError, match="zip"):
        sample_rows(np.zeros((2, 3), dtype=np.float32), sequences_of(GREEDY), EOS)
