"""Retries, order and ends, over a scripted link: no sockets."""

import threading
from collections.abc import Callable

import pytest

from kv_transfer.interfaces import OutboundTransfer, Peer
from kv_transfer.messages import Busy, CommitOrder, PrepareOrder, Ready, WorkerIdentity, stale
from kv_transfer.outbound.link import ChunkBatch, PairBroken
from kv_transfer.outbound.pair import PairLimits
from kv_transfer.outbound.sender import PairedKvSender
from pdserve.core.errors import ErrorReason, PdserveError
from tests.kv_transfer.support import LAYOUT, WAIT_S, EndLog, peer_at, plan_of

LIMITS = PairLimits(base_deadline_s=2.0, min_bytes_per_s=1_000_000, block_bytes=LAYOUT.block_bytes)
PEER = peer_at("nowhere:1")


class Script:
    """What the links do. `faults[name]` is a list of actions, one taken at each call: an exception, or a function."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.faults: dict[str, list[Exception | Callable[[], object]]] = {}
        self.lease_s = 1000.0
        self.num_links = 0
        self.num_closed = 0
        self.changed = threading.Condition()

    def take(self, name: str, *details: object) -> object:
        with self.changed:
            self.calls.append((name, *details))
            faults = self.faults.get(name, [])
            fault = faults.pop(0) if faults else None
            self.changed.notify_all()
        if isinstance(fault, Exception):
            raise fault
        return fault() if fault is not None else None

    def names(self) -> list[object]:
        return [call[0] for call in self.calls]

    def wait_for_call(self, name: str, count: int = 1) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.names().count(name) >= count, WAIT_S)


class ScriptedLink:
    transport = "scripted"

    def __init__(self, script: Script, epoch: int) -> None:
        self.script = script
        self.epoch = epoch
        self.closed = threading.Event()
        script.num_links += 1

    def handshake(self, timeout_s: float) -> None:
        self.script.take("handshake", self.epoch)

    def prepare(self, order: PrepareOrder, timeout_s: float) -> Ready | Busy:
        answer = self.script.take("prepare", order.transfer_id)
        return answer if isinstance(answer, Busy) else Ready(self.script.lease_s, ())

    def send(self, batch: ChunkBatch, timeout_s: float) -> int:
        assert 0 < timeout_s <= 60.0
        self.script.take("send", batch.transfer_id, batch.first_sequence, batch.first_block, batch.block_ids)
        return batch.first_sequence + 1

    def commit(self, order: CommitOrder, timeout_s: float) -> None:
        self.script.take("commit", order.transfer_id, order.num_chunks, order.output_token_ids)

    def abort(self, transfer_id: int, reason: str, timeout_s: float) -> None:
        self.script.take("abort", transfer_id)

    def close(self) -> None:
        if not self.closed.is_set():
            self.closed.set()
            self.script.num_closed += 1


class Bench:
    def __init__(self, limits: PairLimits = LIMITS) -> None:
        self.script = Script()
        self.ends = EndLog()
        self.peers: list[Peer] = []
        self.num_broken: list[int] = []
        self.links: list[ScriptedLink] = []
        self.sender = PairedKvSender(self.make_link, limits)

    def make_link(self, peer: Peer, epoch: int, num_broken: int) -> ScriptedLink:
        self.peers.append(peer)
        self.num_broken.append(num_broken)
        self.links.append(ScriptedLink(self.script, epoch))
        return self.links[-1]

    def open(self, sequence: int = 1, num_blocks: int = 2, deadline_s: float = 30.0) -> OutboundTransfer:
        return self.sender.open(plan_of(sequence, PEER, num_blocks, deadline_s), self.ends)

    def error_of(self, sequence: int = 1) -> ErrorReason | None:
        error = self.ends.wait(sequence).error
        return None if error is None else error.reason


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.sender.close()
    assert bench.script.num_closed == bench.script.num_links
    assert bench.sender.num_open == 0


def send_all(transfer: OutboundTransfer) -> None:
    transfer.send([4])
    transfer.send([9])
    transfer.commit([5])


def test_steps_come_in_order(bench: Bench):
    send_all(bench.open())
    end = bench.ends.wait(1)
    assert end.error is None
    assert end.num_bytes == 2 * LAYOUT.block_bytes
    assert bench.script.calls == [
        ("handshake", 1),
        ("prepare", 1),
        ("send", 1, 0, 0, (4,)),
        ("send", 1, 1, 1, (9,)),
        ("commit", 1, 2, (5,)),
    ]


def test_nothing_to_send_still_prepares_and_commits(bench: Bench):
    bench.open(num_blocks=0).commit([5])
    assert bench.error_of() is None
    assert bench.script.names() == ["handshake", "prepare", "commit"]


def test_prepare_goes_out_before_the_first_block(bench: Bench):
    bench.open()
    bench.script.wait_for_call("prepare")


@pytest.mark.parametrize("step", ["handshake", "prepare", "send", "commit"])
def test_a_broken_pair_is_retried_once_from_the_first_block(step: str, bench: Bench):
    bench.script.faults[step] = [PairBroken("cut")]
    if step == "commit":
        bench.script.faults[step].append(stale("unknown"))  # the peer had not committed before the cut
    send_all(bench.open())
    assert bench.error_of() is None
    assert bench.script.num_links == 2
    assert [call[1] for call in bench.script.calls if call[0] == "handshake"] == [1, 2]
    assert bench.num_broken == [0, 1]  # by which the next transport is chosen
    last_id = max(call[1] for call in bench.script.calls if call[0] == "prepare")
    assert [call for call in bench.script.calls if call[0] == "send" and call[1] == last_id] == [
        ("send", last_id, 0, 0, (4,)),
        ("send", last_id, 1, 1, (9,)),
    ]


@pytest.mark.parametrize("step", ["handshake", "prepare", "send", "commit"])
def test_a_second_break_ends_the_transfer(step: str, bench: Bench):
    bench.script.faults[step] = [PairBroken("cut"), PairBroken("cut again")]
    send_all(bench.open())
    assert bench.error_of() is ErrorReason.TRANSFER_FAILED
    assert bench.script.num_closed == 2


def test_a_commit_whose_answer_was_lost_is_asked_for_and_not_sent_twice(bench: Bench):
    bench.script.faults["commit"] = [PairBroken("the answer was lost")]
    send_all(bench.open())
    assert bench.error_of() is None
    assert bench.script.names()[-3:] == ["commit", "handshake", "commit"]
    assert bench.script.names().count("prepare") == 1


def test_a_break_costs_every_prepared_transfer_one_attempt(bench: Bench):
    first, second = bench.open(1), bench.open(2)
    bench.script.wait_for_call("prepare", 2)
    bench.script.faults["send"] = [PairBroken("cut")]
    send_all(first)
    assert bench.error_of(1) is None
    bench.script.faults["send"] = [PairBroken("cut")]
    send_all(second)
    assert bench.error_of(2) is ErrorReason.TRANSFER_FAILED


def test_a_pair_that_never_answers_ends_all_its_transfers_after_two_handshakes(bench: Bench):
    inside = threading.Event()
    bench.script.faults["handshake"] = [lambda: inside.wait(WAIT_S), PairBroken("no"), PairBroken("no")]
    bench.script.faults["prepare"] = [PairBroken("no")]
    for sequence in range(1, 6):
        bench.open(sequence)
    inside.set()
    for sequence in range(1, 6):
        assert bench.error_of(sequence) is ErrorReason.TRANSFER_FAILED
    assert bench.script.num_links == 3


def test_a_refused_handshake_ends_everything_without_a_retry(bench: Bench):
    bench.script.faults["handshake"] = [PdserveError(ErrorReason.INCOMPATIBLE_PEER, "dtype")]
    send_all(bench.open())
    assert bench.error_of() is ErrorReason.INCOMPATIBLE_PEER
    send_all(bench.open(2))
    assert bench.error_of(2) is None


@pytest.mark.parametrize("step", ["prepare", "send", "commit"])
def test_a_stale_transfer_ends_alone(step: str, bench: Bench):
    other = bench.open(2)
    bench.script.wait_for_call("prepare")
    bench.script.faults[step] = [stale("cancelled")]
    send_all(bench.open())
    assert bench.error_of() is ErrorReason.STALE
    assert "abort" not in bench.script.names()
    send_all(other)
    assert bench.error_of(2) is None
    assert bench.script.num_links == 1


def test_another_refusal_aborts_what_was_prepared(bench: Bench):
    bench.script.faults["send"] = [PdserveError(ErrorReason.INTERNAL, "reading failed")]
    send_all(bench.open())
    assert bench.error_of() is ErrorReason.INTERNAL
    assert bench.script.names() == ["handshake", "prepare", "send", "abort"]


def test_busy_is_tried_again_and_does_not_hold_up_others(bench: Bench):
    bench.script.faults["prepare"] = [lambda: Busy(1000.0), lambda: None, lambda: Busy(0.001)]
    waiting = bench.open(1)
    bench.script.wait_for_call("prepare")
    send_all(bench.open(2))
    assert bench.error_of(2) is None
    assert not bench.ends.has(1)
    send_all(bench.open(3))
    assert bench.error_of(3) is None
    waiting.abort("enough")
    assert bench.error_of(1) is ErrorReason.CANCELLED


def test_busy_for_ever_ends_with_the_deadline(bench: Bench):
    bench.script.faults["prepare"] = [lambda: Busy(0.01)] * 1000
    bench.open(deadline_s=0.1)
    assert bench.error_of() is ErrorReason.DEADLINE_EXCEEDED


def test_an_idle_transfer_ends_with_its_deadline_and_tells_the_peer(bench: Bench):
    bench.open(deadline_s=0.05)
    assert bench.error_of() is ErrorReason.DEADLINE_EXCEEDED
    assert bench.script.names() == ["handshake", "prepare", "abort"]


def test_a_call_cut_short_by_its_requests_deadline_does_not_poison_the_pair(bench: Bench):
    other = bench.open(2)
    bench.script.wait_for_call("prepare")
    late = threading.Event()

    def time_out() -> None:
        late.wait(0.06)
        raise PairBroken("deadline exceeded")

    bench.script.faults["send"] = [time_out]
    send_all(bench.open(1, deadline_s=0.05))
    assert bench.error_of(1) is ErrorReason.DEADLINE_EXCEEDED
    send_all(other)
    assert bench.error_of(2) is None
    assert bench.script.num_links == 1


def test_an_abort_waits_for_the_running_call(bench: Bench):
    """E01, sending side: the source blocks are the sender's until no call can read them."""
    go_on = threading.Event()
    bench.script.faults["send"] = [lambda: go_on.wait(WAIT_S)]
    transfer = bench.open()
    transfer.send([4])
    bench.script.wait_for_call("send")
    transfer.abort("cancelled")
    assert not bench.ends.has(1)
    go_on.set()
    assert bench.error_of() is ErrorReason.CANCELLED
    assert bench.script.names() == ["handshake", "prepare", "send", "abort"]


def test_an_abort_before_prepare_sends_nothing(bench: Bench):
    go_on = threading.Event()
    bench.script.faults["handshake"] = [lambda: go_on.wait(WAIT_S)]
    first, second = bench.open(1), bench.open(2)
    second.abort("cancelled")
    go_on.set()
    assert bench.error_of(2) is ErrorReason.CANCELLED
    send_all(first)
    assert bench.error_of(1) is None
    assert "abort" not in bench.script.names()


def test_anything_after_the_end_is_ignored(bench: Bench):
    transfer = bench.open()
    send_all(transfer)
    assert bench.error_of() is None
    transfer.abort("late")
    transfer.send([1])
    transfer.commit([1])
    assert bench.script.names().count("commit") == 1


@pytest.mark.parametrize("groups", [[[1]], [[1, 2, 3]], []])
def test_another_number_of_blocks_than_planned_is_never_committed(groups: list[list[int]], bench: Bench):
    transfer = bench.open()
    for group in groups:
        transfer.send(group)
    transfer.commit([5])
    assert bench.error_of() is ErrorReason.INTERNAL
    assert "commit" not in bench.script.names()


def test_a_quiet_transfer_renews_its_lease(bench: Bench):
    bench.script.lease_s = 0.03
    transfer = bench.open()
    bench.script.wait_for_call("send", 2)
    assert [call[1:] for call in bench.script.calls if call[0] == "send"][:2] == [(1, 0, 0, ()), (1, 1, 0, ())]
    send_all(transfer)
    assert bench.error_of() is None


def test_a_failing_on_end_does_not_stop_the_pair(bench: Bench):
    def fail(end: object) -> None:
        raise RuntimeError("bug")

    send_all(bench.sender.open(plan_of(1, PEER, 2), fail))
    send_all(bench.open(2))
    assert bench.error_of(2) is None


def test_an_exception_in_a_step_ends_that_transfer_only(bench: Bench):
    bench.script.faults["send"] = [RuntimeError("bug")]
    send_all(bench.open(1))
    send_all(bench.open(2))
    assert bench.error_of(1) is ErrorReason.INTERNAL
    assert bench.error_of(2) is None


def test_close_aborts_what_is_open_and_ends_the_threads():
    bench = Bench()
    bench.open(1)
    bench.script.wait_for_call("prepare")
    bench.sender.close()
    assert bench.error_of() is ErrorReason.CANCELLED
    assert bench.script.names() == ["handshake", "prepare", "abort"]
    with pytest.raises(PdserveError) as refused:
        bench.open(2)
    assert refused.value.reason is ErrorReason.DRAINING


def test_close_cuts_a_call_that_hangs():
    bench = Bench()

    def hang() -> None:
        assert bench.links[0].closed.wait(WAIT_S)
        raise PairBroken("closed")

    bench.script.faults["send"] = [hang]
    bench.open(1).send([4])
    bench.script.wait_for_call("send")
    bench.sender.close()
    assert bench.error_of() is ErrorReason.CANCELLED


def test_a_new_incarnation_retires_the_old_pair(bench: Bench):
    send_all(bench.open(1))
    assert bench.error_of(1) is None
    restarted = peer_at("nowhere:1", receiver=WorkerIdentity("decode-0", 23))
    send_all(bench.sender.open(plan_of(2, restarted, 2), bench.ends))
    assert bench.error_of(2) is None
    assert bench.links[0].closed.wait(WAIT_S)
    assert not bench.links[1].closed.is_set()
    assert [link.epoch for link in bench.links] == [1, 2]


def test_an_idle_pair_drops_its_link_and_a_later_transfer_makes_a_new_one():
    bench = Bench(PairLimits(2.0, 1_000_000, LAYOUT.block_bytes, idle_s=0.01))
    send_all(bench.open(1))
    assert bench.error_of(1) is None
    assert bench.links[0].closed.wait(WAIT_S)
    send_all(bench.open(2))
    assert bench.error_of(2) is None
    assert bench.links[1].epoch == 2
    bench.sender.close()
