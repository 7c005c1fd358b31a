"""Any interleaving of the loop, the engine and transfers around one decode worker: ledger and pool end up as one."""

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from decode_service.entry import DecodeJob
from decode_service.requests import DecodeRequests, Prompt
from decode_service.scheduler import DecodeScheduler
from decode_service.stage import DecodeStage
from kv_transfer.interfaces import InboundCommit
from pdserve.core.block_keys import PrefixScope
from pdserve.core.errors import PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.model_info import KvLayout
from pdserve.core.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool, OwnerKind
from pdserve.engine.events import SequenceReleased, TokenSampled
from pdserve.engine.ledger import Demand, Reservation, ReservationLedger
from pdserve.engine.step_loop import StageResources
from tests.support.fake_engine import FakeRunner, FakeStore, expected_output

BLOCK = 4
NUM_BLOCKS = 12
COORDINATOR = 7
NUMBERS = st.integers(1, 2)
PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)
SCOPE = PrefixScope("f00d", KvLayout("float32", BLOCK, num_layers=1, num_kv_heads=1, head_dim=1), "fake-1")


class _Engine:
    """Stands for EngineThread: what is posted waits until the test lets the engine turn."""

    def __init__(self) -> None:
        self.inbox: deque[Callable[[], object]] = deque()

    def post(self, function: Callable[[], object]) -> None:
        self.inbox.append(function)


class DecodeWorkerMachine(RuleBasedStateMachine):
    """Loop callbacks, engine turns and event deliveries happen in any order, as threads would have it. All ask for the
    same prompt, of two full blocks and one token: what earlier ones left in the cache does not come again."""

    @initialize()
    def start(self) -> None:
        self.now_s = 0.0
        self.pool = BlockPool(NUM_BLOCKS)
        self.ledger = ReservationLedger(NUM_BLOCKS, BLOCK, lease_s=1000.0)
        resources = StageResources(self.pool, BLOCK, frozenset({0}), SCOPE)
        self.stage = DecodeStage(DecodeScheduler(2), resources)
        self.store = FakeStore(NUM_BLOCKS, BLOCK)
        self.runner = FakeRunner(BLOCK, store=self.store)
        self.engine = _Engine()
        self.loop: deque[Callable[[], object]] = deque()
        self.failed: list[SequenceId] = []
        self.requests = DecodeRequests(
            self.ledger,
            self.engine,  # type: ignore[arg-type]
            self.stage,
            lambda sequence_id, _: self.failed.append(sequence_id),
            lambda: None,
        )
        self.requests.cancel_inbound = self.cancel_inbound
        self.reservations: dict[int, Reservation] = {}
        self.inbound: dict[int, tuple[int, ...]] = {}

    def sequence_id(self, number: int) -> SequenceId:
        return SequenceId(COORDINATOR, number)

    def cancel_inbound(self, reservation: Reservation) -> None:
        """As a receiver does: the blocks of a transfer that is not being committed go back through the engine."""
        number = reservation.sequence_id.sequence
        if number in self.inbound:
            self.give_back(number)

    def give_back(self, number: int) -> None:
        block_ids, sequence_id = self.inbound.pop(number), self.sequence_id(number)

        def release() -> None:
            self.stage.release_inbound(sequence_id, block_ids)
            self.loop.append(lambda: self.requests.inbound_ended(sequence_id))

        self.engine.post(release)

    # --- the coordinator ----------------------------------------------------------------------------------------------

    @rule(number=NUMBERS, num_tokens=st.integers(13, 24), deadline_s=st.sampled_from([3.0, 6.0, 1e9]))
    def reserve(self, number: int, num_tokens: int, deadline_s: float) -> None:
        demand = Demand(num_tokens, num_tokens)
        try:
            answer = self.requests.reserve(
                self.sequence_id(number), demand, self.now_s, self.now_s + deadline_s, Prompt(PROMPT)
            )
        except PdserveError:
            return
        if isinstance(answer, Reservation):
            self.reservations[number] = answer

    @rule(number=NUMBERS, deadline_s=st.sampled_from([0.5, 1e9]))
    def submit(self, number: int, deadline_s: float) -> None:
        if number in self.reservations:
            params = SamplingParams(max_tokens=4, temperature=0.0)
            job = DecodeJob(self.sequence_id(number), PROMPT, len(PROMPT), params, self.now_s + deadline_s, 0)
            self.requests.submit(job, self.reservations[number].reservation_id)

    @rule(number=NUMBERS, deadline_s=st.sampled_from([0.5, 1e9]))
    def arrive(self, number: int, deadline_s: float) -> None:
        """The usual beginning, in one go, so that what follows gets more of the search."""
        self.reserve(number, 16, 1e9)
        self.submit(number, deadline_s)
        self.transfer_begins(number)
        while self.engine.inbox:
            self.engine_runs_one_command()

    @rule(number=NUMBERS)
    def cancel(self, number: int) -> None:
        self.requests.cancel(self.sequence_id(number))

    @rule()
    def stream_ends(self) -> None:
        self.requests.cancel_coordinator(COORDINATOR)

    @rule()
    def reap(self) -> None:
        self.requests.reap(self.now_s)

    # --- a transfer ---------------------------------------------------------------------------------------------------

    @rule(number=NUMBERS)
    def transfer_begins(self, number: int) -> None:
        if number not in self.reservations or number in self.inbound:
            return
        sequence_id = self.sequence_id(number)
        num_blocks = 3 - self.requests.num_cached_blocks(sequence_id)
        try:
            self.requests.begin_inbound(sequence_id, self.reservations[number].reservation_id, num_blocks)
        except PdserveError:
            return

        def allocate() -> None:
            try:
                block_ids = self.inbound[number] = self.stage.allocate_inbound(sequence_id, num_blocks)
            except PdserveError:
                self.loop.append(lambda: self.requests.inbound_ended(sequence_id))
                return
            for position in range(BLOCK * (3 - num_blocks), len(PROMPT)):
                block, slot = divmod(position, BLOCK)
                self.store.put(block_ids[block - 3 + num_blocks], slot, PROMPT[position])

        allocate()  # its answer is waited for; nothing of this transfer can happen before

    @rule(number=NUMBERS)
    def transfer_commits(self, number: int) -> None:
        if number not in self.inbound:
            return
        sequence_id, reservation = self.sequence_id(number), self.reservations[number]
        try:
            self.requests.check_live(sequence_id, reservation.reservation_id)
        except PdserveError:
            self.give_back(number)
            return
        block_ids = self.inbound.pop(number)
        token = expected_output(PROMPT, 1)[0]
        commit = InboundCommit(sequence_id, reservation.reservation_id, block_ids, len(PROMPT), (token,), 0, 0.0)

        def adopt() -> None:
            self.stage.adopt(commit, OwnerKind.INBOUND, self.now_s)
            self.loop.append(lambda: self.requests.inbound_ended(sequence_id, adopted=True))

        self.engine.post(adopt)

    @rule(number=NUMBERS)
    def transfer_fails(self, number: int) -> None:
        if number in self.inbound:
            self.give_back(number)

    # --- threads take turns -------------------------------------------------------------------------------------------

    @rule()
    def time_passes(self) -> None:
        self.now_s += 1.0

    @rule()
    def loop_runs_one(self) -> None:
        if self.loop:
            self.loop.popleft()()

    @rule()
    def engine_runs_one_command(self) -> None:
        if self.engine.inbox:
            self.engine.inbox.popleft()()
            self.publish()

    @rule()
    def engine_steps(self) -> None:
        """Also with nothing to decode: beside a prefill stage, the step may be for that one's sake."""
        chunks = self.stage.plan(self.now_s)
        self.stage.apply(chunks, self.runner.run(chunks), self.now_s)
        self.publish()

    def publish(self) -> None:
        for event in self.stage.take_events():
            if isinstance(event, TokenSampled):
                assert event.token_id == expected_output(PROMPT, event.index + 1)[-1]
            if isinstance(event, SequenceReleased):
                sequence_id = event.sequence_id
                self.loop.append(lambda sequence_id=sequence_id: self.requests.engine_released(sequence_id))

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def no_block_is_held_without_a_reservation(self) -> None:
        if hasattr(self, "pool"):
            held = self.pool.num_blocks - self.pool.num_free_blocks
            assert held <= self.ledger.num_reserved_blocks <= NUM_BLOCKS
            self.pool.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.requests.cancel_coordinator(COORDINATOR)
        for number in list(self.inbound):
            self.give_back(number)
        while self.loop or self.engine.inbox or self.stage.has_work:
            self.loop_runs_one()
            self.engine_runs_one_command()
            self.engine_steps()
        assert len(self.requests) == 0
        assert self.ledger.num_reserved_blocks == 0
        assert self.pool.num_free_blocks == NUM_BLOCKS
        self.pool.check_integrity()


TestDecodeWorkerMachine = DecodeWorkerMachine.TestCase
TestDecodeWorkerMachine.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


def test_what_is_pinned_counts_towards_what_a_transfer_may_ask_for() -> None:
    machine = DecodeWorkerMachine()
    machine.start()
    machine.arrive(1, 1e9)
    machine.transfer_commits(1)
    machine.engine_runs_one_command()
    sequence_id = machine.sequence_id(2)
    answer = machine.requests.reserve(sequence_id, Demand(12, 12), 0.0, 1e9, Prompt(PROMPT))
    assert isinstance(answer, Reservation)
    assert (answer.num_blocks, machine.requests.num_cached_blocks(sequence_id)) == (3, 2)
    with pytest.raises(PdserveError, match="4 blocks wanted under a reservation of 3"):
        machine.requests.begin_inbound(sequence_id, answer.reservation_id, 2)
    machine.requests.begin_inbound(sequence_id, answer.reservation_id, 1)
