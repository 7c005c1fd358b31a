import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_service.entry import DecodeJob
from decode_service.scheduler import DecodeScheduler
from decode_service.stage import DecodeStage
from kv_transfer.interfaces import InboundCommit
from pdserve.core.block_keys import PrefixScope
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import FinishReason, SamplingParams
from pdserve.engine.block_pool import BlockPool, OwnerKind
from pdserve.engine.events import Event, SequenceFailed, SequenceReleased, StageSnapshot, TokenSampled
from pdserve.engine.step_loop import StageResources
from tests.support.fake_engine import FakeRunner, FakeStore, expected_output

BLOCK = 4
EOS = 0


class Bench:
    """A stage with a pool and a fake runner, stepped by hand; KV arrives when the test says so. With a prefix cache it
    matters what is in the blocks."""

    def __init__(self, num_blocks: int = 64, max_batch_size: int = 8, scope: PrefixScope | None = None) -> None:
        self.pool = BlockPool(num_blocks)
        resources = StageResources(self.pool, BLOCK, frozenset({EOS}), scope)
        self.stage = DecodeStage(DecodeScheduler(max_batch_size), resources)
        self.store = FakeStore(num_blocks, BLOCK)
        self.runner = FakeRunner(BLOCK, store=self.store if scope is not None else None)
        self.now_s = 0.0
        self.outputs: dict[SequenceId, list[int]] = {}
        self.finished: dict[SequenceId, FinishReason] = {}

    def job(self, number: int, prompt: list[int], deadline_s: float = 1e9, **sampling: object) -> DecodeJob:
        params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
        num_blocks = blocks_for_tokens(len(prompt) + params.max_tokens, BLOCK)
        return DecodeJob(SequenceId(1, number), tuple(prompt), len(prompt), params, deadline_s, num_blocks)

    def deliver(self, job: DecodeJob, first_token: int | None = None, num_tokens: int | None = None) -> None:
        """Receive and commit the prompt's KV, as much of it as is not pinned."""
        num_tokens = len(job.token_ids) if num_tokens is None else num_tokens
        num_pinned = self.pool.num_pinned(job.sequence_id)
        block_ids = self.stage.allocate_inbound(job.sequence_id, blocks_for_tokens(num_tokens, BLOCK) - num_pinned)
        for position in range(num_pinned * BLOCK, num_tokens):
            self.store.put(block_ids[position // BLOCK - num_pinned], position % BLOCK, job.token_ids[position])
        token = expected_output(job.token_ids, 1)[0] if first_token is None else first_token
        commit = InboundCommit(job.sequence_id, 1, block_ids, num_tokens, (token,), 0, 0.25)
        self.stage.adopt(commit, OwnerKind.INBOUND, self.now_s)

    def step(self) -> list[Event]:
        self.now_s += 1.0
        chunks = self.stage.plan(self.now_s)
        self.stage.apply(chunks, self.runner.run(chunks), self.now_s)
        events = self.stage.take_events()
        for event in events:
            if isinstance(event, TokenSampled):
                output = self.outputs.setdefault(event.sequence_id, [])
                assert event.index == len(output) + 1  # prefill sampled index 0
                output.append(event.token_id)
                if event.finish_reason is not None:
                    self.finished[event.sequence_id] = event.finish_reason
        return events

    def run_until_idle(self) -> None:
        while self.stage.has_work:
            self.step()

    def assert_empty(self) -> None:
        assert self.pool.num_free_blocks == self.pool.num_blocks
        assert self.stage.snapshot() == StageSnapshot()
        self.pool.check_integrity()


@pytest.mark.parametrize("submit_first", [True, False])
def test_decoding_goes_on_from_what_prefill_sampled(submit_first: bool) -> None:
    bench = Bench()
    job = bench.job(1, [5, 6, 7, 8, 9], max_tokens=8)
    if submit_first:
        bench.stage.submit(job)
        assert not bench.stage.has_work  # nothing before the commit
        bench.deliver(job)
    else:
        bench.deliver(job)
        assert not bench.stage.has_work
        bench.stage.submit(job)
    bench.run_until_idle()
    assert bench.outputs[job.sequence_id] == expected_output(job.token_ids, 8)[1:]
    assert bench.finished[job.sequence_id] is FinishReason.LENGTH
    bench.assert_empty()


@given(
    st.lists(
        st.tuples(st.integers(1, 13), st.integers(2, 9), st.integers(0, 6)),
        min_size=1,
        max_size=10,
    ),
    st.integers(1, 4),
)
def test_sequences_join_and_leave_at_any_step_without_touching_each_other(
    arrivals: list[tuple[int, int, int]], max_batch_size: int
) -> None:
    bench = Bench(num_blocks=256, max_batch_size=max_batch_size)
    jobs: list[DecodeJob] = []
    for number, (num_prompt, max_tokens, gap) in enumerate(arrivals):
        job = bench.job(number, [1 + number + i for i in range(num_prompt)], max_tokens=max_tokens)
        jobs.append(job)
        bench.stage.submit(job)
        bench.deliver(job)
        for _ in range(gap):
            if bench.stage.has_work:
                bench.step()
                assert bench.stage.snapshot().num_running <= max_batch_size
    bench.run_until_idle()
    for job in jobs:
        assert bench.outputs[job.sequence_id] == expected_output(job.token_ids, job.sampling.max_tokens)[1:]
    bench.assert_empty()


@pytest.mark.parametrize("num_prompt", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_blocks_at_the_end_are_those_of_all_tokens_with_kv(num_prompt: int) -> None:
    bench = Bench()
    job = bench.job(1, list(range(1, num_prompt + 1)), max_tokens=BLOCK + 2)
    bench.stage.submit(job)
    bench.deliver(job)
    while bench.stage.has_work:
        held = bench.pool.num_blocks - bench.pool.num_free_blocks
        assert held <= job.num_blocks
        bench.step()
    bench.assert_empty()


def test_eos_ends_and_ignore_eos_does_not() -> None:
    bench = Bench()
    prompt = [3, 1, 4]
    token = expected_output(prompt, 3)[2]
    stopping = bench.job(1, prompt, stop_token_ids=frozenset({token}))
    bench.stage.submit(stopping)
    bench.deliver(stopping)
    bench.run_until_idle()
    assert bench.outputs[stopping.sequence_id] == expected_output(prompt, 3)[1:]
    assert bench.finished[stopping.sequence_id] is FinishReason.STOP


def test_a_second_commit_is_refused_and_leaves_its_blocks_with_the_transfer() -> None:
    bench = Bench()
    job = bench.job(1, [1, 2, 3])
    bench.deliver(job)
    block_ids = bench.stage.allocate_inbound(job.sequence_id, 1)
    commit = InboundCommit(job.sequence_id, 1, block_ids, 3, (5,), 0, 0.0)
    with pytest.raises(PdserveError, match="STALE"):
        bench.stage.adopt(commit, OwnerKind.INBOUND, 0.0)
    bench.stage.release_inbound(job.sequence_id, block_ids)
    bench.stage.cancel(job.sequence_id)
    bench.assert_empty()


def test_kv_of_the_wrong_length_is_never_decoded_from() -> None:
    bench = Bench()
    job = bench.job(1, [1, 2, 3, 4, 5])
    bench.stage.submit(job)
    bench.deliver(job, num_tokens=4)
    events = bench.stage.take_events()
    assert [type(e) for e in events] == [SequenceFailed, SequenceReleased]
    assert bench.runner.num_steps == 0
    bench.assert_empty()


def test_an_expired_sequence_ends_with_an_error() -> None:
    bench = Bench()
    job = bench.job(1, [1, 2, 3], deadline_s=2.5)
    bench.stage.submit(job)
    bench.deliver(job)
    events = [event for _ in range(3) for event in bench.step()]
    assert isinstance(events[-2], SequenceFailed)
    assert events[-2].error.reason is ErrorReason.DEADLINE_EXCEEDED
    bench.assert_empty()


def test_outgrowing_the_reservation_is_an_error_not_a_theft() -> None:
    bench = Bench()
    job = bench.job(1, [1, 2, 3, 4])
    small = DecodeJob(job.sequence_id, job.token_ids, 4, job.sampling, job.deadline_s, num_blocks=1)
    bench.stage.submit(small)
    bench.deliver(small)
    with pytest.raises(RuntimeError, match="outgrows its reservation"):
        bench.stage.plan(1.0)


@given(st.permutations(["submit", "submit", "deliver", "cancel", "cancel", "step"]))
def test_any_order_of_events_frees_every_block_once(order: list[str]) -> None:
    bench = Bench()
    job = bench.job(1, [1, 2, 3, 4, 5])
    for action in order:
        match action:
            case "submit":
                bench.stage.submit(job)
            case "cancel":
                bench.stage.cancel(job.sequence_id)
                assert isinstance(bench.stage.take_events()[-1], SequenceReleased)
            case "deliver":
                bench.deliver(job)
            case _:
                if bench.stage.has_work:
                    bench.stage.plan(bench.now_s)
    bench.stage.cancel(job.sequence_id)
    bench.assert_empty()
