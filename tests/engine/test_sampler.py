"""The sampler against a slow second implementation of the documented rule, and the rule's corners one by one."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.sampling import SamplingParams
from pdserve.engine import sampler
from pdserve.engine.sampler import sample
from tests.support.sampler_oracle import slow_sample

# Few distinct values, so that ties are common.
VALUES = st.sampled_from([-math.inf, -3.0, -1.5, 0.0, 0.25, 0.5, 0.5, 1.0, 2.0, 2.0, 7.5])
SIZE = 12


@st.composite
def cases(draw):
    logits = draw(st.lists(st.one_of(VALUES, st.floats(-30, 30, width=32)), min_size=SIZE, max_size=SIZE))
    ids = draw(st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=9))
    params = SamplingParams(
        max_tokens=9,
        temperature=draw(st.sampled_from([0.0, 9e-6, 0.3, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 11, 50])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        logit_bias=draw(st.dictionaries(st.integers(0, SIZE - 1), st.sampled_from([-100.0, 1.5, 100.0]), max_size=3)),
        min_tokens=draw(st.sampled_from([0, 4])),
        seed=draw(st.integers(0, 2**64 - 1)),
        choice=draw(st.integers(0, 3)),
        stop_token_ids=draw(st.frozensets(st.integers(0, SIZE - 1), max_size=2)),
        ignore_eos=draw(st.booleans()),
    )
    return logits, params, ids, draw(st.integers(1, len(ids)))


def row(values) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def params(**fields) -> SamplingParams:
    return SamplingParams(max_tokens=99, **fields)


def drawn(logits, num=300, **fields) -> set[int]:
    """Which tokens come up at `num` different positions."""
    return {sample(row(logits), params(seed=11, **fields), [0] * n, 1).token_id for n in range(1, num)}


@settings(max_examples=500, deadline=None)
@given(cases())
def test_equals_the_slow_rule(case):
    logits, chosen, ids, num_prompt = case
    assert sample(row(logits), chosen, ids, num_prompt, (2, 5)).token_id == slow_sample(
        logits, chosen, ids, num_prompt, (2, 5)
    )


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_p": 0.999999}, {"top_k": 700, "top_p": 0.8}])
def test_equals_the_slow_rule_on_a_large_vocabulary(fields):
    logits = np.random.default_rng(3).normal(0, 2, 5000).astype(np.float32)
    logits[::7] = logits[0]
    for position in range(1, 12):
        chosen = params(seed=position, **fields)
        assert sample(logits, chosen, [1] * position, 1).token_id == slow_sample(
            logits.tolist(), chosen, [1] * position, 1
        )


def test_frequencies_follow_the_distribution():
    weights = np.array([0.5, 0.3, 0.15, 0.05])
    draws = [sample(row(np.log(weights)), params(seed=5), [0] * n, 1).token_id for n in range(1, 4001)]
    shares = np.bincount(draws, minlength=4) / len(draws)
    np.testing.assert_allclose(shares, weights, atol=0.03)


def test_same_seed_and_position_same_token_and_any_other_differs_somewhere():
    flat = row(np.zeros(1000))
    first = [sample(flat, params(seed=1), [0] * n, 1).token_id for n in range(1, 30)]
    assert first == [sample(flat, params(seed=1), [0] * n, 1).token_id for n in range(1, 30)]
    assert first != [sample(flat, params(seed=2), [0] * n, 1).token_id for n in range(1, 30)]
    assert first != [sample(flat, params(seed=1, choice=1), [0] * n, 1).token_id for n in range(1, 30)]
    assert first != [sample(flat, params(seed=1 << 32), [0] * n, 1).token_id for n in range(1, 30)]


def test_greedy_ties_go_to_the_lower_id_and_nothing_is_sorted(monkeypatch):
    monkeypatch.setattr(sampler, "descending", None)
    monkeypatch.setattr(sampler, "draw", None)
    assert sample(row([1, 3, 3, 2]), params(temperature=0.0, top_k=2, top_p=0.5), [0], 1).token_id == 1


def test_top_k_keeps_exactly_k_with_ties_by_id():
    assert drawn([2, 2, 2, 2, 1], top_k=2) == {0, 1}
    assert drawn([1, 2, 2, 2, 2], top_k=3) == {1, 2, 3}


def test_top_p_is_the_shortest_prefix_that_reaches_it():
    halves = np.log([0.5, 0.25, 0.125, 0.125])
    assert drawn(halves, top_p=0.5) == {0}
    assert drawn(halves, top_p=0.51) == {0, 1}
    assert drawn([0, 0, 0, 0], top_p=0.5) == {0, 1}
    assert drawn(halves, top_p=1e-9) == {0}


def test_filters_see_what_the_one_before_renormalised():
    quarters = np.log([0.4, 0.3, 0.2, 0.1])
    assert drawn(quarters, top_k=2, top_p=0.57) == {0}
    assert drawn(quarters, top_p=0.57) == {0, 1}


def test_min_p_keeps_what_reaches_its_share_of_the_best():
    assert drawn(np.log([0.5, 0.2501, 0.2499]), min_p=0.5) == {0, 1}


def test_min_tokens_masks_every_end():
    logits = row([0, 9, 8, 7, 1])
    chosen = params(temperature=0.0, min_tokens=2, stop_token_ids=frozenset({3}))
    assert sample(logits, chosen, [0, 4], 1, (1, 2)).token_id == 4
    assert sample(logits, chosen, [0, 4, 4], 1, (1, 2)).token_id == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nan_or_inf_draws_nothing(bad, temperature):
    assert sample(row([1, bad, 2]), params(temperature=temperature), [0], 1).token_id is None


def test_nothing_left_to_draw_from_draws_nothing():
    assert sample(row([-math.inf] * 3), params(), [0], 1).token_id is None
    masked = params(min_tokens=3, stop_token_ids=frozenset({0, 1}))
    assert sample(row([1, 2]), masked, [0], 1).token_id is None


def test_logprobs_are_of_the_raw_logits():
    logits = row([1.0, 2.0, 2.0, -1.0])
    found = sample(logits, params(temperature=0.0, logit_bias={3: 100.0}, num_logprobs=3), [0], 1)
    exact = np.array([1.0, 2.0, 2.0, -1.0]) - np.log(np.exp([1.0, 2.0, 2.0, -1.0]).sum())
    assert found.token_id == 3
    assert found.logprobs.logprob == pytest.approx(exact[3], abs=1e-12)
    assert [token for token, _ in found.logprobs.top] == [1, 2, 0]
    assert [value for _, value in found.logprobs.top] == pytest.approx(exact[[1, 2, 0]], abs=1e-12)
    assert sample(logits, params(num_logprobs=0), [0], 1).logprobs.top == ()
    assert sample(logits, params(), [0], 1).logprobs is None


def test_the_row_is_left_as_it_was():
    logits = row([1, 2, 3])
    sample(logits, params(logit_bias={0: 5.0}, presence_penalty=1.0, top_p=0.5), [0, 1], 1)
    np.testing.assert_array_equal(logits, row([1, 2, 3]))


@pytest.mark.parametrize("filters", [{}, {"min_p": 0.5}, {"top_p": 0.5}, {"top_k": 1}])
@pytest.mark.parametrize("overflowing", [{"temperature": 1e-5}, {"repetition_penalty": 0.01}])
def test_what_overflows_draws_nothing(overflowing, filters):
    assert sample(row([1e37, -1e37, 5, -math.inf]), params(**overflowing, **filters), [0, 1], 1).token_id is None
