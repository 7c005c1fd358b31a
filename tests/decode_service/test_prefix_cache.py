"""What a decode stage holds of the prefix cache for a reservation, takes with a commit, and gives as it decodes."""

import pytest

from decode_service.entry import DecodeJob
from kv_transfer.interfaces import InboundCommit
from pdserve.core.block_keys import COMMON_GROUP, PrefixGroup, PrefixScope
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_info import KvLayout
from pdserve.engine.block_pool import Owner, OwnerKind
from pdserve.engine.events import SequenceFailed
from pdserve.engine.sequence import ChunkResult, Sampled
from tests.decode_service.test_stage import BLOCK, Bench
from tests.support.fake_engine import expected_output

SCOPE = PrefixScope("f00d", KvLayout("float32", BLOCK, num_layers=1, num_kv_heads=1, head_dim=1), "fake-1")
PROMPT = list(range(1, 2 * BLOCK + 1))


def pin(bench: Bench, job: DecodeJob, prompt: list[int] | None = None, group: PrefixGroup = COMMON_GROUP) -> int:
    return bench.stage.pin_prefix(job.sequence_id, prompt or list(job.token_ids), group, job.num_blocks)


def run(bench: Bench, number: int, prompt: list[int], **sampling: object) -> int:
    """A whole request; how many of its blocks were here."""
    job = bench.job(number, prompt, **sampling)
    num_pinned = pin(bench, job)
    bench.stage.submit(job)
    bench.deliver(job)
    bench.run_until_idle()
    assert bench.outputs[job.sequence_id] == expected_output(prompt, job.sampling.max_tokens)[1:]
    return num_pinned


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1])
def test_only_missing_blocks_come_and_all_full_ones_may_be_here(length: int) -> None:
    bench = Bench(scope=SCOPE)
    prompt = list(range(1, length + 1))
    assert run(bench, 1, prompt) == 0
    assert run(bench, 2, prompt) == length // BLOCK
    totals = bench.stage.totals
    assert (totals.num_prefix_queries, totals.num_prefix_hits) == (2 * length, length // BLOCK * BLOCK)
    bench.assert_empty()


def test_without_a_cache_nothing_is_here() -> None:
    bench = Bench()
    assert [run(bench, number, PROMPT) for number in (1, 2)] == [0, 0]
    assert bench.pool.num_empty_blocks == bench.pool.num_blocks
    assert bench.stage.totals.num_prefix_queries == 0


def test_what_was_decoded_is_here_for_the_next_turn() -> None:
    """Of 8 + 8 tokens 15 have KV: three full blocks."""
    bench = Bench(scope=SCOPE)
    run(bench, 1, PROMPT)
    assert bench.pool.num_cached_blocks == 3
    turn = [*PROMPT, *expected_output(PROMPT, 8), 9, 9]
    assert run(bench, 2, turn) == 3
    bench.assert_empty()


def test_pinned_blocks_are_held_from_the_reservation_on() -> None:
    bench = Bench(num_blocks=4, scope=SCOPE)
    run(bench, 1, PROMPT, max_tokens=2)
    job = bench.job(2, PROMPT)
    assert pin(bench, job) == 2
    other = bench.job(3, PROMPT)
    assert len(bench.stage.allocate_inbound(other.sequence_id, 2)) == 2
    with pytest.raises(PdserveError, match="still holds"):
        bench.stage.allocate_inbound(other.sequence_id, 1)
    bench.stage.unpin_prefix(job.sequence_id)
    bench.stage.unpin_prefix(job.sequence_id)
    assert len(bench.stage.allocate_inbound(other.sequence_id, 2)) == 2


def test_no_more_is_pinned_than_is_reserved() -> None:
    bench = Bench(scope=SCOPE)
    run(bench, 1, PROMPT)
    job = bench.job(2, PROMPT)
    assert bench.stage.pin_prefix(job.sequence_id, PROMPT, COMMON_GROUP, 1) == 1


@pytest.mark.parametrize("wrong", ["tokens", "group"])
def test_kv_pinned_for_other_tokens_or_another_group_is_never_decoded_from(wrong: str) -> None:
    bench = Bench(scope=SCOPE)
    salted = PrefixGroup(cache_salt="s")
    run(bench, 1, PROMPT)
    prompt = [*PROMPT[:-1], 90] if wrong == "tokens" else PROMPT
    job = bench.job(2, prompt)
    if wrong == "group":
        job = DecodeJob(job.sequence_id, job.token_ids, 8, job.sampling, job.deadline_s, job.num_blocks, salted)
    assert pin(bench, job, PROMPT) == 2
    bench.stage.submit(job)
    steps = bench.runner.num_steps
    bench.deliver(job)
    failed = bench.stage.take_events()[0]
    assert isinstance(failed, SequenceFailed)
    assert failed.error.reason is ErrorReason.TRANSFER_FAILED
    bench.run_until_idle()
    assert bench.runner.num_steps == steps
    bench.assert_empty()


def test_a_prompt_computed_here_is_never_decoded_from_as_other_tokens() -> None:
    """Blocks of this very pool, cached for what prefill was told, are not cached once more for something else."""
    bench = Bench(scope=SCOPE)
    told, job = bench.job(1, PROMPT), bench.job(1, [*PROMPT[:-1], 90])
    outbound = Owner(OwnerKind.OUTBOUND, told.sequence_id)
    block_ids = bench.pool.allocate(2, outbound)
    chain = SCOPE.key_chain(COMMON_GROUP)
    chain.extend(PROMPT, 2)
    bench.pool.publish(chain, block_ids, 0, 2, outbound)
    bench.stage.adopt(InboundCommit(told.sequence_id, 1, tuple(block_ids), 8, (5,), 0, 0.0), outbound.kind, 0.0)
    bench.stage.submit(job)
    failed = bench.stage.take_events()[0]
    assert isinstance(failed, SequenceFailed)
    assert failed.error.reason is ErrorReason.TRANSFER_FAILED
    assert (pin(bench, bench.job(2, PROMPT)), pin(bench, bench.job(3, list(job.token_ids)))) == (2, 1)
    for number in (2, 3):
        bench.stage.unpin_prefix(bench.job(number, PROMPT).sequence_id)
    bench.assert_empty()


def test_blocks_that_do_not_make_up_the_tokens_with_the_pinned_ones_are_refused() -> None:
    bench = Bench(scope=SCOPE)
    run(bench, 1, PROMPT)
    job = bench.job(2, PROMPT)
    pin(bench, job)
    block_ids = bench.stage.allocate_inbound(job.sequence_id, 2)
    with pytest.raises(PdserveError, match="2 were here"):
        bench.stage.adopt(InboundCommit(job.sequence_id, 1, block_ids, 8, (5,), 0, 0.0), OwnerKind.INBOUND, 0.0)
    bench.stage.release_inbound(job.sequence_id, block_ids)
    assert bench.pool.num_pinned(job.sequence_id) == 2  # a second attempt may still bring what is missing
    bench.stage.unpin_prefix(job.sequence_id)
    bench.assert_empty()


def test_received_blocks_are_found_while_the_sequence_is_still_running() -> None:
    bench = Bench(scope=SCOPE)
    first, second = bench.job(1, PROMPT), bench.job(2, PROMPT)
    bench.deliver(first)
    assert pin(bench, second) == 0  # whose tokens they are is known with the submit
    bench.stage.submit(first)
    assert pin(bench, bench.job(3, PROMPT)) == 2
    bench.stage.unpin_prefix(bench.job(3, PROMPT).sequence_id)
    bench.run_until_idle()
    bench.assert_empty()


def test_nothing_of_a_sequence_that_ended_with_nan_stays_cached() -> None:
    """G01."""
    bench = Bench(scope=SCOPE)
    job = bench.job(1, PROMPT)
    bench.stage.submit(job)
    bench.deliver(job)
    bench.step()
    bench.stage.apply(bench.stage.plan(2.0), [ChunkResult(Sampled(None))], 3.0)
    assert bench.pool.num_empty_blocks == bench.pool.num_blocks
    bench.assert_empty()
