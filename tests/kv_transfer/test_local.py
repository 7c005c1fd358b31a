import pytest

from kv_transfer.interfaces import InboundCommit
from kv_transfer.local import LocalKvSender
from kv_transfer.messages import stale
from pdserve.core.errors import ErrorReason, PdserveError
from tests.kv_transfer.support import EndLog, peer_at, plan_of

PEER = peer_at("")


class Bench:
    def __init__(self, refusal: PdserveError | None = None) -> None:
        self.commits: list[InboundCommit] = []
        self.refusal = refusal
        self.ends = EndLog()
        self.sender = LocalKvSender(self.hand_over)

    def hand_over(self, commit: InboundCommit) -> None:
        assert not self.ends.has(commit.sequence_id.sequence), "the blocks must change hands before the end is told"
        if self.refusal is not None:
            raise self.refusal
        self.commits.append(commit)

    def reason(self, sequence: int) -> ErrorReason | None:
        error = self.ends.wait(sequence).error
        return None if error is None else error.reason


def test_the_very_same_blocks_are_handed_over_at_once():
    bench = Bench()
    transfer = bench.sender.open(plan_of(1, PEER, 3), bench.ends)
    transfer.send([8, 2])
    transfer.send([5])
    transfer.commit([42])
    [commit] = bench.commits
    assert (commit.block_ids, commit.num_tokens, commit.output_token_ids) == ((8, 2, 5), 12, (42,))
    assert (commit.sequence_id.sequence, commit.reservation_id, commit.num_bytes) == (1, 1, 0)
    assert bench.reason(1) is None
    assert bench.sender.num_open == 0


def test_nothing_to_hand_over_is_still_a_commit():
    bench = Bench()
    bench.sender.open(plan_of(1, PEER, 0), bench.ends).commit([42])
    assert bench.commits[0].block_ids == ()


def test_a_refusal_leaves_the_blocks_with_the_sender():
    bench = Bench(stale("cancelled"))
    transfer = bench.sender.open(plan_of(1, PEER, 1), bench.ends)
    transfer.send([1])
    transfer.commit([42])
    assert bench.reason(1) is ErrorReason.STALE


def test_an_abort_ends_once_and_later_calls_do_nothing():
    bench = Bench()
    transfer = bench.sender.open(plan_of(1, PEER, 1), bench.ends)
    transfer.send([1])
    transfer.abort("cancelled")
    transfer.abort("again")
    transfer.commit([42])
    assert bench.reason(1) is ErrorReason.CANCELLED
    assert not bench.commits


def test_another_number_of_blocks_than_planned_is_never_committed():
    bench = Bench()
    bench.sender.open(plan_of(1, PEER, 2), bench.ends).commit([42])
    assert bench.reason(1) is ErrorReason.INTERNAL
    assert not bench.commits


def test_close_aborts_what_is_open_and_refuses_more():
    bench = Bench()
    bench.sender.open(plan_of(1, PEER, 1), bench.ends)
    bench.sender.close()
    assert bench.reason(1) is ErrorReason.CANCELLED
    with pytest.raises(PdserveError) as refused:
        bench.sender.open(plan_of(2, PEER, 1), bench.ends)
    assert refused.value.reason is ErrorReason.DRAINING
