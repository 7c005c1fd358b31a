import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_bench.load.prompts import (
    BLOCK_SIZE,
    FreshPrompts,
    PrefixPrompts,
    derived_seed,
    intended_hit_rate,
    warm_up_seed,
)

VOCABULARY = 49_152
Prompt = tuple[int, ...]


def blocks_of(prompts: list[Prompt]) -> set[Prompt]:
    """Every whole block, wherever it stands."""
    begins = range(0, max(map(len, prompts)), BLOCK_SIZE)
    blocks = (prompt[begin : begin + BLOCK_SIZE] for prompt in prompts for begin in begins)
    return {block for block in blocks if len(block) == BLOCK_SIZE}


def fresh(seed: int, count: int, num_tokens: int = 64, vocab_size: int = VOCABULARY) -> list[Prompt]:
    prompts = FreshPrompts(seed, vocab_size)
    return [prompts.next(num_tokens) for _ in range(count)]


@settings(deadline=None)
@given(st.integers(), st.integers(32, 200_000), st.lists(st.integers(1, 300), max_size=5))
def test_fresh_prompts_have_exact_lengths_and_ids_of_the_vocabulary(
    seed: int, vocab_size: int, lengths: list[int]
) -> None:
    prompts = FreshPrompts(seed, vocab_size)
    for num_tokens in lengths:
        prompt = prompts.next(num_tokens)
        assert len(prompt) == num_tokens
        assert all(type(token_id) is int and min(256, vocab_size // 2) <= token_id < vocab_size for token_id in prompt)


def test_the_first_id_can_be_set() -> None:
    assert {*FreshPrompts(1, 64, first_id=0).next(5000)} == {*range(64)}
    assert {*FreshPrompts(1, 64, first_id=10).next(5000)} == {*range(10, 64)}


@pytest.mark.parametrize("vocab_size", [32, 512, VOCABULARY])
def test_no_two_prompts_of_one_seed_or_of_several_share_a_block(vocab_size: int) -> None:
    prompts = [prompt for seed in range(20) for prompt in fresh(seed, 50, vocab_size=vocab_size)]
    assert len(blocks_of(prompts)) == 20 * 50 * 4


def test_a_second_run_with_another_seed_hits_nothing_and_with_the_same_seed_all() -> None:
    """FIELD_CASES J04."""
    assert intended_hit_rate(fresh(1, 20) + fresh(2, 20)) == 0
    assert intended_hit_rate(fresh(1, 20) + fresh(1, 20)) == pytest.approx(0.5 * 48 / 64)


def test_warm_up_prompts_share_no_block_with_measured_ones() -> None:
    """FIELD_CASES J04, for both kinds of prompts."""
    assert not blocks_of(fresh(warm_up_seed(5), 50)) & blocks_of(fresh(5, 50))
    measured, warm_up = (PrefixPrompts(seed, VOCABULARY, 32) for seed in (5, warm_up_seed(5)))
    assert not blocks_of([measured.of(64, (0, 1))]) & blocks_of([warm_up.of(64, (0, 1))])


def test_derived_seeds_differ_by_seed_and_name_and_stay_what_they_are() -> None:
    seeds = {derived_seed(seed, *names) for seed in (0, 1, -1) for names in ((), ("a",), ("a", 1), ("a", "1"), ("a1",))}
    assert len(seeds) == 15
    assert derived_seed(1, "a") == derived_seed(True, "a")
    assert warm_up_seed(7) == derived_seed(7, "warm-up") != 7


NAMES = st.lists(st.integers(0, 3), max_size=6)


@settings(deadline=None)
@given(NAMES, NAMES, st.integers(1, 60), st.integers(1, 60))
def test_equal_names_at_equal_positions_are_equal_tokens_and_the_rest_is_fresh(
    first: list[int], second: list[int], first_length: int, second_length: int
) -> None:
    block = 8
    prompts = PrefixPrompts(3, VOCABULARY, block)
    one, other = prompts.of(first_length, first), prompts.of(second_length, second)
    assert (len(one), len(other)) == (first_length, second_length)
    for position in range(0, min(first_length, second_length), block):
        index, both = position // block, slice(position, min(position + block, first_length, second_length))
        same_name = index < min(len(first), len(second)) and first[index] == second[index]
        if both.stop - both.start >= 4:
            assert (one[both] == other[both]) == same_name


def test_a_name_at_another_position_is_another_block() -> None:
    prompt = PrefixPrompts(3, VOCABULARY, 16).of(32, (7, 7))
    assert prompt[:16] != prompt[16:]


def test_named_blocks_are_the_same_whatever_was_asked_for_before() -> None:
    busy = PrefixPrompts(3, VOCABULARY, 16)
    busy.of(100, (4, 5))
    assert busy.of(32, (1, 2)) == PrefixPrompts(3, VOCABULARY, 16).of(32, (1, 2))
    assert busy.of(32, (1, 2)) != PrefixPrompts(4, VOCABULARY, 16).of(32, (1, 2))


def naive_hit_rate(prompts: list[Prompt], block_size: int) -> float:
    """By the definition: the longest whole-block prefix that any earlier prompt has, less than the whole prompt."""
    found = 0
    for number, prompt in enumerate(prompts):
        lengths = range(block_size, len(prompt), block_size)
        earlier = prompts[:number]
        found += max((n for n in lengths if any(other[:n] == prompt[:n] for other in earlier)), default=0)
    return found / max(1, sum(map(len, prompts)))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple), max_size=8), st.integers(1, 4))
def test_the_intended_hit_rate_is_that_of_the_definition(prompts: list[Prompt], block_size: int) -> None:
    assert intended_hit_rate(prompts, block_size) == pytest.approx(naive_hit_rate(prompts, block_size))


def test_the_last_token_is_always_computed() -> None:
    prompt = (*range(32),)
    assert intended_hit_rate([prompt, prompt]) == 16 / 64
    assert intended_hit_rate([prompt, (*prompt, 99)]) == 32 / 65
    assert intended_hit_rate([]) == 0


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary of 32 or more, not 31"):
        FreshPrompts(1, 31)
    with pytest.raises(ValueError, match="at least one token, not 0"):
        FreshPrompts(1, 64).next(0)
    with pytest.raises(ValueError, match="at least one token, not 0"):
        PrefixPrompts(1, 64, 0)
    with pytest.raises(ValueError, match="at least one token, not -1"):
        PrefixPrompts(1, 64, 8).of(-1, (1, 2))
