from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.interfaces import OutboundEnd
from pdserve.core.block_keys import PrefixScope
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import FinishReason
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.events import (
    Event,
    SequenceFailed,
    SequenceReleased,
    SequenceTransferred,
    StageSnapshot,
    TokenSampled,
)
from pdserve.engine.sequence import ChunkResult, Sampled, Sequence
from pdserve.engine.step_loop import StageResources
from prefill_service.prompt import PrefillJob
from prefill_service.scheduler import PrefillScheduler
from prefill_service.stage import PrefillStage
from tests.support.fake_engine import FakeRunner, FakeStore, make_sequence, next_token

BLOCK = 4
EOS = 0


@dataclass
class FakeTransfer:
    """Records what the stage asks of it; the test decides when it ends."""

    sent: list[int] = field(default_factory=list)
    committed: list[tuple[int, ...]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def send(self, block_ids: Seq[int]) -> None:
        assert not self.committed, "sent after commit"
        self.sent += block_ids

    def commit(self, output_token_ids: Seq[int]) -> None:
        self.committed.append(tuple(output_token_ids))

    def abort(self, reason: str) -> None:
        self.aborted.append(reason)


class Bench:
    """A stage with a pool and a fake runner, stepped by hand."""

    def __init__(self, num_blocks: int = 64, budget: int = 16, scope: PrefixScope | None = None) -> None:
        self.pool = BlockPool(num_blocks)
        resources = StageResources(self.pool, BLOCK, frozenset({EOS}), scope)
        self.stage = PrefillStage(PrefillScheduler(budget, 8), resources)
        self.runner = FakeRunner(BLOCK, store=FakeStore(num_blocks, BLOCK))
        self.transfers: dict[SequenceId, FakeTransfer] = {}
        self.now_s = 0.0

    def submit(self, sequence: Sequence, *, transfer: bool = True, deadline_s: float = 100.0, **job: Any) -> None:
        def open_transfer() -> FakeTransfer:
            return self.transfers.setdefault(sequence.id, FakeTransfer())

        self.stage.submit(PrefillJob(sequence, deadline_s, self.now_s, open_transfer if transfer else None, **job))

    def step(self) -> list[Event]:
        self.now_s += 1.0
        chunks = self.stage.plan(self.now_s)
        self.stage.apply(chunks, self.runner.run(chunks), self.now_s)
        return self.stage.take_events()

    def end(self, sequence: Sequence, error: PdserveError | None = None) -> list[Event]:
        self.stage.transfer_ended(OutboundEnd(sequence.id, error, 10, 0.5, "grpc"))
        return self.stage.take_events()

    def assert_empty(self) -> None:
        assert self.pool.num_free_blocks == self.pool.num_blocks
        assert not self.stage.has_work
        assert self.stage.snapshot() == StageSnapshot()
        self.pool.check_integrity()


@given(st.integers(1, 40), st.integers(1, 24))
def test_blocks_are_sent_as_they_fill_and_all_of_them_before_the_commit(num_tokens: int, budget: int) -> None:
    bench = Bench(budget=budget)
    sequence = make_sequence(1, num_tokens)
    bench.submit(sequence)
    events: list[Event] = []
    while not events:
        events = bench.step()
        full = sequence.num_computed_tokens // BLOCK
        assert len(bench.transfers[sequence.id].sent) >= full
    transfer = bench.transfers[sequence.id]
    assert transfer.sent == sequence.block_ids
    assert len(transfer.sent) == blocks_for_tokens(num_tokens, BLOCK)
    assert transfer.committed == [(sequence.token_ids[-1],)]
    (event,) = events
    assert isinstance(event, TokenSampled)
    assert (event.index, event.token_id) == (0, next_token(sequence.token_ids[:-1]))
    assert bench.pool.num_free_blocks == bench.pool.num_blocks - len(transfer.sent)  # held until Done
    assert [type(e) for e in bench.end(sequence)] == [SequenceTransferred, SequenceReleased]
    bench.assert_empty()


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [({"max_tokens": 1}, FinishReason.LENGTH), ({"stop_token_ids": frozenset(range(97))}, FinishReason.STOP)],
)
def test_a_first_token_that_ends_the_sequence_aborts_the_transfer(
    sampling: dict[str, object], reason: FinishReason
) -> None:
    bench = Bench()
    sequence = make_sequence(1, 5, **sampling)
    bench.submit(sequence)
    (token,) = bench.step()
    assert isinstance(token, TokenSampled)
    assert token.finish_reason is reason
    transfer = bench.transfers[sequence.id]
    assert (len(transfer.aborted), transfer.committed) == (1, [])
    assert [type(e) for e in bench.end(sequence, PdserveError(ErrorReason.CANCELLED, ""))] == [SequenceReleased]
    bench.assert_empty()


def test_without_a_transfer_the_blocks_are_free_after_the_first_token() -> None:
    bench = Bench()
    bench.submit(make_sequence(1, 5, max_tokens=1), transfer=False)
    assert [type(e) for e in bench.step()] == [TokenSampled, SequenceReleased]
    bench.assert_empty()


def test_a_cancelled_prompt_keeps_its_blocks_until_the_transfer_has_ended() -> None:
    bench = Bench(budget=8)
    sequence = make_sequence(1, 20)
    bench.submit(sequence)
    bench.step()
    bench.stage.cancel(sequence.id)
    assert bench.stage.take_events() == []
    assert bench.pool.num_free_blocks < bench.pool.num_blocks
    assert not bench.stage.has_work  # and no further token is computed
    bench.end(sequence, PdserveError(ErrorReason.CANCELLED, ""))
    bench.assert_empty()


def test_a_transfer_that_fails_in_the_middle_stops_the_prefill() -> None:
    bench = Bench(budget=8)
    sequence = make_sequence(1, 20)
    bench.submit(sequence)
    bench.step()
    events = bench.end(sequence, PdserveError(ErrorReason.TRANSFER_FAILED, "lost"))
    assert [type(e) for e in events] == [SequenceFailed, SequenceReleased]
    bench.assert_empty()


def test_an_expired_prompt_computes_nothing() -> None:
    bench = Bench()
    bench.submit(make_sequence(1, 5), deadline_s=0.5)
    events = bench.step()
    assert [type(e) for e in events] == [SequenceFailed, SequenceReleased]
    assert isinstance(events[0], SequenceFailed)
    assert events[0].error.reason is ErrorReason.DEADLINE_EXCEEDED
    assert bench.stage.totals.num_tokens == 0
    bench.assert_empty()


def test_a_row_of_nan_ends_only_its_own_sequence() -> None:
    bench = Bench()
    bad, good = make_sequence(1, 5), make_sequence(2, 6)
    for sequence in (bad, good):
        bench.submit(sequence)
    chunks = bench.stage.plan(1.0)
    results = [ChunkResult(Sampled(None if c.sequence is bad else 7)) for c in chunks]
    bench.stage.apply(chunks, results, 2.0)
    failed, token = bench.stage.take_events()
    assert isinstance(failed, SequenceFailed)
    assert failed.error.reason is ErrorReason.NUMERICAL_ERROR
    assert isinstance(token, TokenSampled)
    assert token.sequence_id == good.id
    assert bench.transfers[bad.id].committed == []
    assert bench.stage.totals.num_nan_rows == 1


def test_a_failed_forward_ends_its_sequences_and_frees_their_blocks() -> None:
    bench = Bench(budget=8)
    sequence = make_sequence(1, 20)
    bench.submit(sequence, transfer=False)
    bench.step()
    bench.stage.fail(bench.stage.plan(2.0), RuntimeError("boom"))
    assert [type(e) for e in bench.stage.take_events()] == [SequenceFailed, SequenceReleased]
    bench.assert_empty()


@given(st.permutations(["cancel", "cancel", "end", "end", "submit"]), st.integers(0, 3))
def test_any_order_of_events_frees_every_block_once(order: list[str], num_steps: int) -> None:
    bench = Bench(budget=8)
    sequence = make_sequence(1, 20)
    bench.submit(sequence)
    for _ in range(num_steps):
        bench.step()
    opened = sequence.id in bench.transfers
    released = 0
    for action in order:
        if action == "cancel":
            bench.stage.cancel(sequence.id)
        elif action == "submit":
            bench.submit(make_sequence(1, 20), transfer=False)
            bench.stage.cancel(sequence.id)
        elif opened:
            bench.stage.transfer_ended(
                OutboundEnd(sequence.id, PdserveError(ErrorReason.CANCELLED, ""), 0, 0.0, "grpc")
            )
        released += sum(isinstance(e, SequenceReleased) for e in bench.stage.take_events())
    bench.assert_empty()
    assert released >= 1
    assert bench.stage.totals.num_stale > 0


def test_the_rate_counts_each_step_once_however_many_prompts_shared_it() -> None:
    bench = Bench(budget=8)
    for number in (1, 2, 3):
        bench.submit(make_sequence(number, 8, max_tokens=1), transfer=False)
    for planned_s in (10.0, 20.0, 30.0):
        chunks = bench.stage.plan(planned_s)
        bench.stage.apply(chunks, bench.runner.run(chunks), planned_s + 2.0)
    assert (bench.stage.totals.num_tokens, bench.stage.totals.compute_s) == (24, 6.0)


@pytest.mark.parametrize("budget", [1, 5, 8, 24])
def test_the_prompts_logprobs_come_once_with_the_first_token(budget: int) -> None:
    bench = Bench(budget=budget)
    sequence = make_sequence(1, 20, num_prompt_logprobs=1)
    bench.submit(sequence)
    events: list[Event] = []
    while not events:
        events = bench.step()
    (token,) = events
    assert isinstance(token, TokenSampled)
    assert [entry.logprob for entry in token.prompt_logprobs] == [-float(p) for p in range(1, 20)]


def test_a_bad_row_in_a_chunk_that_samples_nothing_ends_the_prompt() -> None:
    bench = Bench(budget=8)
    sequence = make_sequence(1, 20, num_prompt_logprobs=1)
    bench.submit(sequence)
    chunks = bench.stage.plan(1.0)
    bench.stage.apply(chunks, [ChunkResult(Sampled(None))], 2.0)
    (failed,) = bench.stage.take_events()
    assert isinstance(failed, SequenceFailed)
    assert failed.error.reason is ErrorReason.NUMERICAL_ERROR
    assert bench.stage.totals.num_nan_rows == 1
    assert not bench.stage.has_work
    bench.end(sequence, PdserveError(ErrorReason.CANCELLED, ""))
    bench.assert_empty()
