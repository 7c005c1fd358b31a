"""F02, F04, G01: what a prefill stage takes from the prefix cache, and what it gives to it. KV that was never written,
or is another prompt's, would change the tokens of the fake runner."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.interfaces import OutboundEnd
from pdserve.core.block_keys import PrefixGroup, PrefixScope
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.model_info import KvLayout
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import SamplingParams
from pdserve.engine.events import SequenceFailed, TokenSampled
from pdserve.engine.sequence import ChunkResult, Sampled, Sequence
from tests.prefill_service.test_stage import BLOCK, Bench
from tests.support.fake_engine import make_sequence, next_token

SCOPE = PrefixScope("f00d", KvLayout("float32", BLOCK, num_layers=1, num_kv_heads=1, head_dim=1), "fake-1")
CANCELLED = PdserveError(ErrorReason.CANCELLED, "")


def sequence_of(number: int, token_ids: list[int], **sampling: int) -> Sequence:
    params = SamplingParams(**{"max_tokens": 1, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return Sequence(SequenceId(1, number), list(token_ids), len(token_ids), params)


def run(bench: Bench, sequence: Sequence, **job: object) -> TokenSampled:
    """Compute a prompt that nobody else shares steps with, to its end; its token."""
    bench.submit(sequence, transfer=False, **job)
    while bench.stage.has_work:
        for event in bench.step():
            if isinstance(event, TokenSampled):
                return event
    raise AssertionError("no token came")


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1])
def test_a_warm_prompt_computes_at_least_its_last_token_and_gives_the_same_one(length: int) -> None:
    bench = Bench(scope=SCOPE)
    prompt = list(range(1, length + 1))
    cold, warm = run(bench, sequence_of(1, prompt)), run(bench, sequence_of(2, prompt))
    expected = (length - 1) // BLOCK * BLOCK
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, expected)
    assert cold.token_id == warm.token_id == next_token(prompt)
    assert bench.runner.num_tokens == 2 * length - expected
    assert (bench.stage.totals.num_prefix_queries, bench.stage.totals.num_prefix_hits) == (2 * length, expected)
    assert bench.pool.num_cached_blocks == length // BLOCK  # a partial last block is never shared
    bench.assert_empty()


def test_without_a_cache_nothing_is_kept() -> None:
    bench = Bench()
    for number in (1, 2):
        assert run(bench, sequence_of(number, [1] * 20)).num_cached_tokens == 0
    assert bench.pool.num_empty_blocks == bench.pool.num_blocks


def test_only_one_group_shares() -> None:
    bench = Bench(scope=SCOPE)
    groups = [PrefixGroup(), PrefixGroup(cache_salt="X"), PrefixGroup(adapter="X"), PrefixGroup("X", "X")]
    for warm in (False, True):
        for number, group in enumerate(groups):
            token = run(bench, sequence_of(10 * warm + number, [1] * 9), group=group)
            assert token.num_cached_tokens == (8 if warm else 0)


def test_a_prompt_whose_own_logprobs_are_asked_for_is_computed_whole() -> None:
    bench = Bench(scope=SCOPE)
    run(bench, sequence_of(1, list(range(1, 21))))
    token = run(bench, sequence_of(2, list(range(1, 21)), num_prompt_logprobs=0))
    assert (token.num_cached_tokens, len(token.prompt_logprobs)) == (0, 19)
    assert bench.stage.totals.num_prefix_queries == 20


@pytest.mark.parametrize("num_steps", range(5))
@pytest.mark.parametrize("planned", [False, True])
def test_only_what_was_computed_before_an_abort_is_found(num_steps: int, planned: bool) -> None:
    """F02: between the allocation and the end of a chunk there is nothing in its blocks yet."""
    bench = Bench(budget=6, scope=SCOPE)
    prompt = list(range(1, 31))
    aborted = sequence_of(1, prompt)
    bench.submit(aborted, transfer=False)
    for _ in range(num_steps):
        bench.step()
    computed = aborted.num_computed_tokens
    if planned and bench.stage.has_work:
        bench.stage.fail(bench.stage.plan(bench.now_s), RuntimeError("planted"))
    else:
        bench.stage.cancel(aborted.id)
    bench.assert_empty()
    warm = run(bench, sequence_of(2, prompt))
    assert (warm.num_cached_tokens, warm.token_id) == (computed // BLOCK * BLOCK, next_token(prompt))


def test_nothing_of_a_prompt_that_ended_with_nan_stays_cached() -> None:
    """G01: any block that it attended to may be the cause, those that it found cached included."""
    bench = Bench(budget=8, scope=SCOPE)
    run(bench, sequence_of(1, [1, 2, 3, 4]))
    bad = sequence_of(2, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16])
    bench.submit(bad)
    bench.step()
    assert bad.num_computed_tokens == 12
    bench.stage.apply(bench.stage.plan(2.0), [ChunkResult(Sampled(None))], 3.0)
    assert isinstance(bench.stage.take_events()[0], SequenceFailed)
    assert (bench.pool.num_cached_blocks, bench.pool.num_empty_blocks) == (0, 60)  # the transfer still reads them
    other = sequence_of(3, bad.token_ids)
    bench.submit(other, transfer=False)
    bench.step()
    bench.end(bad, CANCELLED)
    assert other.num_computed_tokens == 8  # it began cold
    while bench.stage.has_work:
        bench.step()
    bench.assert_empty()


def test_kv_that_gave_nan_is_found_by_nobody_else_while_others_still_have_it() -> None:
    """G01: else a damaged block that all prompts begin with would live for as long as their requests overlap."""
    bench = Bench(budget=8, scope=SCOPE)
    prompt = list(range(1, 17))
    run(bench, sequence_of(1, prompt))
    bad, holder, cold = sequence_of(2, prompt), sequence_of(3, [*prompt, 20, 21]), sequence_of(4, prompt)
    for sequence in (bad, holder):
        bench.submit(sequence, transfer=False)
    chunks = bench.stage.plan(1.0)
    assert [chunk.sequence for chunk in chunks] == [holder, bad]
    results = [bench.runner.run(chunks)[0], ChunkResult(Sampled(None))]
    bench.submit(cold, transfer=False)
    bench.stage.apply(chunks, results, 2.0)
    assert bench.pool.num_free_blocks == bench.pool.num_blocks
    tokens = {event.sequence_id: event for event in bench.stage.take_events() if isinstance(event, TokenSampled)}
    assert tokens[holder.id].token_id == next_token([*prompt, 20, 21])
    bench.step()
    assert cold.num_computed_tokens == 8
    bench.step()
    bench.assert_empty()


@pytest.mark.parametrize("num_cached_there", [0, 1, 3, 5])
def test_what_the_decode_worker_lacks_is_sent_and_cached_blocks_at_once(num_cached_there: int) -> None:
    bench = Bench(budget=BLOCK, scope=SCOPE)
    prompt = list(range(1, 5 * BLOCK + 1))
    run(bench, sequence_of(1, prompt[: 3 * BLOCK]))
    sequence = sequence_of(2, prompt, max_tokens=8)
    bench.submit(sequence, num_cached_blocks=num_cached_there)
    chunks = bench.stage.plan(1.0)
    transfer = bench.transfers[sequence.id]
    assert transfer.sent == sequence.block_ids[num_cached_there:3]
    bench.stage.apply(chunks, bench.runner.run(chunks), 2.0)
    while bench.stage.has_work:
        bench.step()
    assert transfer.sent == sequence.block_ids[num_cached_there:5]
    assert transfer.committed == [(next_token(prompt),)]
    assert bench.pool.num_free_blocks == bench.pool.num_blocks - 5  # shared ones, too, until the transfer has ended
    bench.end(sequence)
    bench.assert_empty()


def test_a_local_prompt_gives_up_what_is_pinned_for_it_when_it_begins() -> None:
    bench = Bench(num_blocks=8, scope=SCOPE)
    run(bench, sequence_of(1, list(range(1, 13))))
    chain = SCOPE.key_chain(PrefixGroup())
    chain.extend(list(range(1, 13)), 3)
    sequence = sequence_of(2, list(range(1, 13)))
    assert bench.pool.pin(chain, 3, sequence.id) == 3
    bench.submit(sequence, local=True)
    bench.stage.plan(1.0)
    assert bench.pool.num_pinned(sequence.id) == 0
    assert (bench.pool.num_free_blocks, bench.pool.num_cached_blocks) == (8 - 3, 1)  # it shares two, and computes one


def test_of_two_equal_prompts_the_one_that_begins_later_is_warm() -> None:
    bench = Bench(budget=2 * BLOCK, scope=SCOPE)
    prompt = list(range(1, 2 * BLOCK + 1))
    sequences = [sequence_of(number, prompt) for number in (1, 2)]
    for sequence in sequences:
        bench.submit(sequence, transfer=False)
    assert isinstance(bench.step()[0], TokenSampled)
    token = bench.step()[0]
    assert isinstance(token, TokenSampled)
    assert (token.num_cached_tokens, token.token_id) == (BLOCK, next_token(prompt))
    bench.assert_empty()


def test_two_equal_prompts_in_one_step_are_both_right() -> None:
    bench = Bench(budget=16 * BLOCK, scope=SCOPE)
    prompt = list(range(1, 2 * BLOCK + 1))
    for number in (1, 2):
        bench.submit(sequence_of(number, prompt), transfer=False)
    tokens = [event.token_id for event in bench.step() if isinstance(event, TokenSampled)]
    assert tokens == [next_token(prompt)] * 2
    assert bench.pool.num_cached_blocks == 2
    bench.assert_empty()


def test_a_long_prompt_that_is_mostly_cached_counts_as_short() -> None:
    bench = Bench(budget=BLOCK, scope=SCOPE)
    run(bench, make_sequence(1, 40, max_tokens=1))
    long, short = make_sequence(1, 42, max_tokens=1), make_sequence(3, 4, max_tokens=1)
    bench.submit(short, transfer=False)
    bench.submit(long, transfer=False)
    assert bench.stage.snapshot().num_queued_tokens == 4 + 2
    assert [chunk.sequence for chunk in bench.stage.plan(1.0)] == [long, short]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=20), st.booleans(), st.integers(0, 2)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 9),
)
@settings(deadline=None)
def test_whatever_is_cached_evicted_or_cancelled_tokens_are_those_of_a_cold_run(
    arrivals: list[tuple[list[int], bool, int]], budget: int
) -> None:
    """A pool that holds little more than one prompt; whoever fits is submitted, as the ledger would have it."""
    bench = Bench(num_blocks=8, budget=budget, scope=SCOPE)
    sampled: dict[SequenceId, int] = {}
    submitted: dict[SequenceId, list[int]] = {}
    held: dict[SequenceId, int] = {}

    def step() -> None:
        for event in bench.step():
            held.pop(event.sequence_id, None)
            if isinstance(event, TokenSampled):
                sampled[event.sequence_id] = event.token_id
        bench.pool.check_integrity()

    for number, (prompt, cancelled, num_steps) in enumerate(arrivals):
        sequence = sequence_of(number, prompt)
        while sum(held.values()) + blocks_for_tokens(len(prompt), BLOCK) > 8:
            step()
        bench.submit(sequence, transfer=False)
        held[sequence.id] = blocks_for_tokens(len(prompt), BLOCK)
        for _ in range(num_steps):
            step()
        if cancelled:
            bench.stage.cancel(sequence.id)
            held.pop(sequence.id, None)
        else:
            submitted[sequence.id] = prompt
    while bench.stage.has_work:
        step()
    assert all(sampled[id_] == next_token(prompt) for id_, prompt in submitted.items())
    bench.assert_empty()


def test_a_transfer_that_fails_leaves_what_was_computed_in_the_cache() -> None:
    """F02: it was computed here; only the other side may not have it."""
    bench = Bench(scope=SCOPE)
    sequence = sequence_of(1, list(range(1, 13)), max_tokens=8)
    bench.submit(sequence)
    bench.step()
    bench.stage.transfer_ended(
        OutboundEnd(sequence.id, PdserveError(ErrorReason.TRANSFER_FAILED, "lost"), 0, 0.1, "grpc")
    )
    assert (bench.pool.num_cached_blocks, bench.pool.num_free_blocks) == (3, 64)
