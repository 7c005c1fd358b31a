"""Any events in any order: no surprise, no block lost or freed twice, no wrong byte committed (E02, E13)."""

from collections.abc import Callable
from contextlib import suppress

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_transfer.chunk_frame import ChunkHeader
from kv_transfer.inbound.payload import ReceivedBytes
from kv_transfer.inbound.transfers import InboundTransfers
from kv_transfer.messages import PairKey, WorkerIdentity
from pdserve.core.errors import PdserveError
from tests.kv_transfer.support import LAYOUT, CheckingHost, MemoryStore, commit_order, prepare_order

SIZE = LAYOUT.block_bytes
NUM_BLOCKS = 12
SENDERS = [WorkerIdentity("prefill-0", 11), WorkerIdentity("prefill-0", 12), WorkerIdentity("prefill-1", 13)]

EVENTS = ["nothing", "abort", "cancel", "epoch", "reap", "commit"]
Key = tuple[WorkerIdentity, int, int]

senders = st.sampled_from(SENDERS)
epochs = st.integers(1, 4)
transfer_ids = st.integers(1, 4)
reservations = st.integers(1, 4)
counts = st.integers(0, 3)


def page_of(incarnation: int, transfer_id: int, index: int) -> bytes:
    return bytes([incarnation, transfer_id % 256, index, 1]) * (SIZE // 4)


class InboundMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.store = MemoryStore(NUM_BLOCKS)
        self.host = CheckingHost(NUM_BLOCKS, range(1, 5))
        self.inbound = InboundTransfers(self.host, self.store, lease_s=10.0, max_open=3)
        self.epochs: dict[WorkerIdentity, int] = {}
        self.next_id = 10
        self.progress: dict[Key, tuple[int, int, int]] = {}

    def attempt(self, call: Callable[[], object]) -> None:
        """A typed refusal is a fair answer to a random event; anything else fails the test."""
        with suppress(PdserveError):
            call()

    @rule(sender=senders, epoch=epochs)
    def handshake(self, sender: WorkerIdentity, epoch: int) -> None:
        self.open_pair(sender, epoch)

    @initialize()
    def first_handshakes(self) -> None:
        self.open_pair(SENDERS[0], 1)
        self.open_pair(SENDERS[2], 1)

    def open_pair(self, sender: WorkerIdentity, epoch: int) -> None:
        self.attempt(lambda: self.inbound.open_pair(sender, epoch))
        self.epochs[sender] = max(epoch, self.epochs.get(sender, 0))

    @rule(data=st.data(), num_blocks=counts)
    def begin(self, data: st.DataObject, num_blocks: int) -> None:
        self.prepare_anew(data, num_blocks)

    def prepare_anew(self, data: st.DataObject, num_blocks: int) -> None:
        """What a correct sender does: the current epoch, an id never used, a reservation that is free."""
        idle = self.host.reservations - self.host.owned.keys() - self.host.committed.keys()
        sender = data.draw(senders)
        if idle and self.epochs.get(sender):
            self.next_id += 1
            self.prepare(sender, self.epochs[sender], self.next_id, min(idle), num_blocks)

    @rule(sender=senders, epoch=epochs, transfer_id=transfer_ids, reservation=reservations, num_blocks=counts)
    def prepare_at_random(
        self, sender: WorkerIdentity, epoch: int, transfer_id: int, reservation: int, num_blocks: int
    ) -> None:
        self.prepare(sender, epoch, transfer_id, reservation, num_blocks)

    def prepare(self, sender: WorkerIdentity, epoch: int, transfer_id: int, reservation: int, num_blocks: int) -> None:
        order = prepare_order(transfer_id, num_blocks, reservation)
        num_owners = len(self.host.owned)
        self.attempt(lambda: self.inbound.prepare(PairKey(sender.incarnation, epoch), order, self.now_s))
        if len(self.host.owned) > num_owners:
            self.progress[sender, epoch, transfer_id] = (num_blocks, 0, 0)

    @rule(
        key=st.tuples(senders, epochs, transfer_ids),
        sequence=st.integers(0, 3),
        first=counts,
        count=counts,
        inside=st.sampled_from(EVENTS),
    )
    def chunk(self, key: Key, sequence: int, first: int, count: int, inside: str) -> None:
        self.deliver(key, sequence, first, count, inside)

    @rule(data=st.data(), count=st.integers(0, 3), inside=st.sampled_from(["nothing", "nothing", *EVENTS]))
    def next_chunk(self, data: st.DataObject, count: int, inside: str) -> None:
        if self.progress:
            self.advance(data.draw(st.sampled_from(list(self.progress))), count, inside)

    @rule(data=st.data())
    def commit_in_turn(self, data: st.DataObject) -> None:
        if self.progress:
            self.commit_as_sent(data.draw(st.sampled_from(list(self.progress))))

    @rule(data=st.data(), num_blocks=counts, inside=st.sampled_from(["nothing", *EVENTS]))
    def whole_transfer(self, data: st.DataObject, num_blocks: int, inside: str) -> None:
        known = set(self.progress)
        self.prepare_anew(data, num_blocks)
        for key in set(self.progress) - known:
            self.advance(key, 1, inside)
            self.advance(key, 3, "nothing")
            self.commit_as_sent(key)

    def advance(self, key: Key, count: int, inside: str) -> None:
        num_blocks, num_chunks, num_sent = self.progress[key]
        count = min(count, num_blocks - num_sent)
        self.progress[key] = (num_blocks, num_chunks + 1, num_sent + count)
        self.deliver(key, num_chunks, num_sent, count, inside)

    def commit_as_sent(self, key: Key) -> None:
        num_blocks, num_chunks, _ = self.progress.pop(key)
        order = commit_order(key[2], num_blocks, num_chunks)
        self.attempt(lambda: self.inbound.commit(PairKey(key[0].incarnation, key[1]), order))

    def deliver(self, key: Key, sequence: int, first: int, count: int, inside: str) -> None:
        sender, epoch, transfer_id = key
        pair = PairKey(sender.incarnation, epoch)
        payload = b"".join(page_of(sender.incarnation, transfer_id, i) for i in range(first, first + count))

        def interfere(block_id: int) -> None:
            self.store.before_write = lambda _: None
            owners = dict(self.host.owned)
            events: dict[str, Callable[[], object]] = {
                "nothing": lambda: None,
                "abort": lambda: self.inbound.abort(pair, transfer_id, "inside"),
                "cancel": lambda: [self.inbound.cancel(reservation) for reservation in range(1, 5)],
                "epoch": lambda: self.open_pair(sender, epoch + 1),
                "reap": lambda: self.inbound.reap(self.now_s + 1000),
                "commit": lambda: self.inbound.commit(pair, commit_order(transfer_id, first + count, sequence + 1)),
            }
            self.attempt(events[inside])
            writer = next(reservation for reservation, blocks in owners.items() if block_id in blocks)
            assert self.host.owned[writer] == owners[writer], "released under its writer"

        self.store.before_write = interfere
        header = ChunkHeader(transfer_id, epoch, sequence, first, 0, count)
        self.attempt(lambda: self.inbound.receive(pair, header, ReceivedBytes(memoryview(payload)), self.now_s))
        self.store.before_write = lambda _: None

    @rule(sender=senders, epoch=epochs, transfer_id=transfer_ids, num_blocks=counts, num_chunks=counts)
    def commit(self, sender: WorkerIdentity, epoch: int, transfer_id: int, num_blocks: int, num_chunks: int) -> None:
        order = commit_order(transfer_id, num_blocks, num_chunks)
        self.attempt(lambda: self.inbound.commit(PairKey(sender.incarnation, epoch), order))

    @rule(sender=senders, epoch=epochs, transfer_id=transfer_ids)
    def abort(self, sender: WorkerIdentity, epoch: int, transfer_id: int) -> None:
        self.inbound.abort(PairKey(sender.incarnation, epoch), transfer_id, "test")

    @rule(reservation=reservations)
    def cancel(self, reservation: int) -> None:
        self.inbound.cancel(reservation)

    @rule(step_s=st.floats(0, 4))
    def pass_time(self, step_s: float) -> None:
        self.now_s += step_s
        self.inbound.reap(self.now_s)

    @rule(reservation=reservations)
    def finish(self, reservation: int) -> None:
        if reservation in self.host.committed:
            self.host.finish(reservation)
        self.host.reservations.add(reservation)

    @invariant()
    def every_block_has_one_owner(self) -> None:
        held = [block for blocks in self.host.owned.values() for block in blocks]
        held += [block for commit in self.host.committed.values() for block in commit.block_ids]
        assert sorted(self.host.free + held) == list(range(NUM_BLOCKS))
        assert self.inbound.stats.num_open == len(self.host.owned)

    @invariant()
    def committed_blocks_hold_their_senders_bytes(self) -> None:
        for commit in self.host.committed.values():
            heads = {tuple(self.store.pages[block_id][:2]) for block_id in commit.block_ids}
            assert len(heads) <= 1
            for index, block_id in enumerate(commit.block_ids):
                incarnation, transfer_id = self.store.pages[block_id][:2]
                assert self.store.pages[block_id] == page_of(incarnation, transfer_id, index)

    def teardown(self) -> None:
        self.inbound.close()
        assert not self.host.owned
        assert self.inbound.stats.num_open == 0


InboundMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestInboundMachine = InboundMachine.TestCase
