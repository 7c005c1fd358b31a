"""Workers turned by hand: real stages, requests, pools and engines, every message between them delivered by a test.

What the event loop does can fall between any two turns of an engine. KV is what a FakeRunner reads back, so that KV
that is lost, early or another's changes a token.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from decode_service.entry import DecodeJob
from decode_service.requests import DecodeRequests, Prompt
from decode_service.scheduler import DecodeScheduler
from decode_service.stage import DecodeStage
from kv_transfer.interfaces import InboundCommit, OutboundEnd, OutboundTransfer, Peer, TransferPlan
from kv_transfer.local import LocalKvSender
from pdserve.core.block_keys import PrefixGroup, PrefixScope
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.model_info import KvLayout
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool, OwnerKind
from pdserve.engine.events import Event, SequenceFailed, SequenceReleased, TokenSampled
from pdserve.engine.ledger import Demand, Reservation, ReservationLedger
from pdserve.engine.sequence import Chunk, ChunkResult, Sampled, Sequence
from pdserve.engine.step_loop import EngineThread, StageResources, Turn
from prefill_service.prompt import PrefillJob
from prefill_service.requests import PrefillRequest, PrefillRequests
from prefill_service.scheduler import PrefillScheduler
from prefill_service.stage import PrefillStage
from tests.support.fake_engine import FakeRunner, FakeStore, expected_output

BLOCK = 2
NUM_BLOCKS = 12
LAYOUT = KvLayout("float32", BLOCK, num_layers=1, num_kv_heads=1, head_dim=1)
SCOPE = PrefixScope("f00d", LAYOUT, "fake-1")
LEASE_S = 10.0


class FaultyRunner(FakeRunner):
    """`fault`: what befalls the next step: "nan" in its last row, or "raise". `broken`: what it should not have been
    given."""

    def __init__(self, store: FakeStore) -> None:
        super().__init__(BLOCK, store=store)
        self.fault = ""
        self.broken: Exception | None = None

    def run(self, chunks: Seq[Chunk]) -> list[ChunkResult]:
        fault, self.fault = self.fault, ""
        try:
            results = super().run(chunks)
        except Exception as error:
            self.broken = error
            raise
        if fault == "raise":
            raise ValueError("planted")
        if fault == "nan":
            results[-1] = ChunkResult(Sampled(None))
        return results


class Half:
    """One worker's engine, turned by hand; what it tells waits in `to_loop` until the loop hears it."""

    def __init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS)
        self.ledger = ReservationLedger(NUM_BLOCKS, BLOCK, LEASE_S)
        self.store = FakeStore(NUM_BLOCKS, BLOCK)
        self.runner = FaultyRunner(self.store)
        self.resources = StageResources(self.pool, BLOCK, frozenset({0}), SCOPE)
        self.to_loop: deque[Callable[[], object]] = deque()
        self.now_s = 0.0

    def start(self, *stages: PrefillStage | DecodeStage) -> None:
        self.engine = EngineThread(self.runner, stages, lambda _: None, lambda _: None, lambda: self.now_s)

    def turn(self) -> Turn:
        while self.engine.has_commands:
            command = self.engine._inbox.get()
            assert command is not None
            command()
        if self.engine.has_work:
            self.engine.step()
        return self.engine._turn()


@dataclass
class Wire:
    """A transfer between two workers: what prefill asked for, and how far the decode side is."""

    plan: TransferPlan
    on_end: Callable[[OutboundEnd], None]
    sent: list[int] = field(default_factory=list[int])
    token: int | None = None
    aborted: bool = False
    phase: str = "new"
    received: tuple[int, ...] = ()

    def send(self, block_ids: Seq[int]) -> None:
        self.sent += block_ids

    def commit(self, output_token_ids: Seq[int]) -> None:
        assert len(self.sent) == self.plan.num_blocks
        (self.token,) = output_token_ids

    def abort(self, reason: str) -> None:
        self.aborted = True

    def end(self, error: PdserveError | None) -> None:
        self.phase = "ended"
        self.on_end(OutboundEnd(self.plan.sequence_id, error, 0, 0.0, "grpc"))


@dataclass
class Asked:
    """A request as its coordinator sees it."""

    sequence_id: SequenceId
    prompt: list[int]
    group: PrefixGroup
    sampling: SamplingParams
    deadline_s: float
    reservation: Reservation
    num_cached: int
    tokens: dict[int, int] = field(default_factory=dict[int, int])
    prefilled: bool = False


class Workers:
    """Two workers, `decode` and `prefill`, or both halves in one, and what two coordinators ask of them."""

    def __init__(self, colocated: bool) -> None:
        self.colocated = colocated
        self.decode = Half()
        self.prefill = self.decode if self.colocated else Half()
        self.decode_stage = DecodeStage(DecodeScheduler(3), self.decode.resources)
        self.prefill_stage = PrefillStage(PrefillScheduler(5, 2), self.prefill.resources)
        stages = (self.decode_stage, self.prefill_stage)
        if self.colocated:
            self.decode.start(*stages)
        else:
            self.decode.start(stages[0])
            self.prefill.start(stages[1])
        self.asked: dict[int, Asked] = {}
        self.wires: dict[SequenceId, Wire] = {}
        self.num_ids = self.num_finished = 0
        self.decoding = DecodeRequests(
            self.decode.ledger, self.decode.engine, self.decode_stage, lambda _id, _error: None, lambda: None
        )
        self.decoding.cancel_inbound = self.cancel_inbound
        local = self.decoding if self.colocated else None
        self.prefilling = PrefillRequests(
            self.prefill.ledger, self.prefill.engine, self.prefill_stage, lambda _id, _error: None, local
        )
        self.sender = LocalKvSender(self.hand_over)

    # --- the coordinators ---------------------------------------------------------------------------------------------

    def reserve(
        self, number: int, token_ids: list[int], max_tokens: int, salt: str, scored: bool, lasts_s: float
    ) -> None:
        """A new request, or the next turn of the conversation that had the number."""
        old = self.asked.get(number)
        if old is not None and old.tokens:
            token_ids = [*old.prompt, *(old.tokens[i] for i in sorted(old.tokens)), *token_ids]
            del token_ids[2 * NUM_BLOCKS - 7 :]
        sequence_id = SequenceId(1 + number % 2, self.num_ids)
        self.num_ids += 1
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, num_prompt_logprobs=1 if scored else None, ignore_eos=True
        )
        group, deadline_s = PrefixGroup(cache_salt=salt), self.decode.now_s + lasts_s
        num_tokens = len(token_ids) + max_tokens
        demand, prompt = Demand(num_tokens, num_tokens), Prompt(token_ids, group)
        answer = self.decoding.reserve(sequence_id, demand, self.decode.now_s, deadline_s, prompt)
        if isinstance(answer, Reservation):
            if old is not None:
                self.cancel(number, prefill=True, decode=True)
            num_cached = self.decoding.num_cached_blocks(sequence_id)
            again = self.decoding.reserve(sequence_id, demand, self.decode.now_s, deadline_s, prompt)
            assert (again, self.decoding.num_cached_blocks(sequence_id)) == (answer, num_cached)
            self.asked[number] = Asked(sequence_id, token_ids, group, sampling, deadline_s, answer, num_cached)

    def submit_decode(self, number: int, wrong: bool) -> None:
        """Now and then for other tokens than were told at Reserve."""
        asked = self.asked.get(number)
        if asked is not None:
            prompt = [3, *asked.prompt[1:]] if wrong else asked.prompt
            job = DecodeJob(
                asked.sequence_id, tuple(prompt), len(prompt), asked.sampling, asked.deadline_s, 0, asked.group
            )
            self.decoding.submit(job, asked.reservation.reservation_id)

    def submit_prefill(self, number: int) -> None:
        asked = self.asked.get(number)
        if asked is None or asked.prefilled:
            return
        asked.prefilled = True
        sequence = Sequence(asked.sequence_id, list(asked.prompt), len(asked.prompt), asked.sampling)
        first_block = 0 if self.colocated else asked.num_cached
        num_blocks = blocks_for_tokens(len(asked.prompt), BLOCK) - first_block
        peer = Peer("decode", 1, "", LAYOUT, "local" if self.colocated else "grpc")
        reservation_id = asked.reservation.reservation_id
        plan = TransferPlan(asked.sequence_id, peer, reservation_id, len(asked.prompt), num_blocks, first_block, 1e6)
        job = PrefillJob(
            sequence, asked.deadline_s, 0.0, lambda: self.open(plan), self.colocated, first_block, asked.group
        )
        self.prefilling.submit(PrefillRequest(job, reservation_id if self.colocated else None))

    def submit(self, number: int, count: int) -> None:
        """As it mostly goes."""
        self.submit_decode(number, wrong=False)
        self.submit_prefill(number)
        self.go_on(count)

    def cancel(self, number: int, prefill: bool, decode: bool) -> None:
        asked = self.asked.get(number)
        if asked is not None:
            if prefill:
                self.prefilling.cancel(asked.sequence_id)
            if decode:
                self.decoding.cancel(asked.sequence_id)

    def heartbeat(self, incarnation: int, gone: bool) -> None:
        if gone:
            self.decoding.cancel_coordinator(incarnation)
            self.prefilling.cancel_coordinator(incarnation)
        else:
            self.decoding.renew(incarnation, self.decode.now_s)

    # --- the workers --------------------------------------------------------------------------------------------------

    def reap(self, seconds: float) -> None:
        for half in (self.decode, self.prefill):
            half.now_s += seconds / (1 + self.colocated)
        self.decoding.reap(self.decode.now_s)
        self.prefilling.reap(self.prefill.now_s)

    def fault(self, fault: str, prefill: bool) -> None:
        (self.prefill if prefill else self.decode).runner.fault = fault

    def turn(self, prefill: bool, heard: bool) -> None:
        half = self.prefill if prefill else self.decode
        turn = half.turn()
        half.to_loop.append(lambda: self.handle(half, turn))
        if heard:
            self.hear()

    def hear(self) -> None:
        """The loop handles what both engines told."""
        for half in (self.decode, self.prefill):
            while half.to_loop:
                half.to_loop.popleft()()

    def go_on(self, count: int) -> None:
        """Undisturbed, everything moves."""
        for _ in range(count):
            self.turn(prefill=True, heard=True)
            self.turn(prefill=False, heard=True)
            for sequence_id in list(self.wires):
                self.move(sequence_id)

    def handle(self, half: Half, turn: Turn) -> None:
        of_decode = turn.events[0] if half is self.decode else []
        of_prefill = turn.events[-1] if half is self.prefill else []
        for event in of_decode:
            self.take(event)
            if isinstance(event, SequenceReleased):
                self.decoding.engine_released(event.sequence_id)
        for event in of_prefill:
            self.take(event)
            if isinstance(event, SequenceReleased):
                self.prefilling.released(event)

    def take(self, event: Event) -> None:
        if isinstance(event, SequenceFailed):
            assert event.error.reason is not ErrorReason.QUEUE_FULL
        if isinstance(event, TokenSampled):
            self.num_finished += event.finish_reason is not None
            for asked in self.asked.values():
                if asked.sequence_id == event.sequence_id:
                    assert event.token_id == expected_output(asked.prompt, event.index + 1)[-1]
                    asked.tokens[event.index] = event.token_id

    # --- transfers ----------------------------------------------------------------------------------------------------

    def hand_over(self, commit: InboundCommit) -> None:
        self.decoding.check_live(commit.sequence_id, commit.reservation_id)
        self.decode_stage.adopt(commit, OwnerKind.OUTBOUND, self.decode.now_s)

    def open(self, plan: TransferPlan) -> OutboundTransfer:
        def on_end(end: OutboundEnd) -> None:
            self.prefill.engine.post(lambda: self.prefill_stage.transfer_ended(end))

        if self.colocated:
            return self.sender.open(plan, on_end)
        return self.wires.setdefault(plan.sequence_id, Wire(plan, on_end))

    def progress(self, position: int, lost: bool) -> None:
        wires = list(self.wires)
        if wires:
            self.move(wires[position % len(wires)], lost=lost)

    def move(self, sequence_id: SequenceId, *, lost: bool = False) -> None:
        """One step of a transfer: prepare, or receive what was sent and commit; or, lost, give up."""
        wire = self.wires[sequence_id]
        if wire.phase == "new":
            self.prepare(wire)
        elif wire.phase == "open" and (lost or wire.aborted):
            self.give_back(wire, PdserveError(ErrorReason.TRANSFER_FAILED, "lost"))
        elif wire.phase == "open" and wire.token is not None:
            self.commit(wire)
        if wire.phase == "ended":
            del self.wires[sequence_id]

    def prepare(self, wire: Wire) -> None:
        plan = wire.plan
        if wire.aborted:
            wire.end(PdserveError(ErrorReason.CANCELLED, ""))
            return
        try:
            self.decoding.begin_inbound(plan.sequence_id, plan.reservation_id, plan.num_blocks)
        except PdserveError as error:
            if error.retry_after_s is None:
                wire.end(error)
            return
        wire.phase = "allocating"

        def allocate() -> None:
            wire.received = self.decode_stage.allocate_inbound(plan.sequence_id, plan.num_blocks)
            if wire.phase == "allocating":
                wire.phase = "open"
            else:
                self.give_back(wire, PdserveError(ErrorReason.CANCELLED, ""))

        self.decode.engine.post(allocate)

    def commit(self, wire: Wire) -> None:
        plan, token = wire.plan, wire.token
        assert token is not None
        for source, target in zip(wire.sent, wire.received, strict=True):
            self.decode.store.write_block(target, 0, bytes(self.prefill.store.read_block(source)))
        try:
            self.decoding.check_live(plan.sequence_id, plan.reservation_id)
        except PdserveError as error:
            self.give_back(wire, error)
            return
        wire.phase = "committing"
        commit = InboundCommit(plan.sequence_id, plan.reservation_id, wire.received, plan.num_tokens, (token,), 0, 0.0)

        def adopt() -> None:
            try:
                self.decode_stage.adopt(commit, OwnerKind.INBOUND, self.decode.now_s)
            except PdserveError as error:
                self.give_back(wire, error)
            else:
                self.decode.to_loop.append(lambda: self.decoding.inbound_ended(plan.sequence_id, adopted=True))
                wire.end(None)

        self.decode.engine.post(adopt)

    def give_back(self, wire: Wire, error: PdserveError) -> None:
        """What the receiver does with a transfer that ends without a commit."""
        sequence_id = wire.plan.sequence_id

        def release() -> None:
            self.decode_stage.release_inbound(sequence_id, wire.received)
            self.decode.to_loop.append(lambda: self.decoding.inbound_ended(sequence_id))

        self.decode.engine.post(release)
        wire.end(error)

    def cancel_inbound(self, reservation: Reservation) -> None:
        if self.colocated:
            self.prefilling.cancel(reservation.sequence_id)
            return
        wire = self.wires.get(reservation.sequence_id)
        if wire is not None and wire.phase == "open":
            self.give_back(wire, PdserveError(ErrorReason.CANCELLED, ""))
        elif wire is not None and wire.phase == "allocating":
            wire.phase = "closing"

    # --- what must hold -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        for half in (self.decode, self.prefill):
            assert half.runner.broken is None
            half.pool.check_integrity()
            assert NUM_BLOCKS - half.pool.num_free_blocks <= half.ledger.num_reserved_blocks <= NUM_BLOCKS

    def end(self) -> None:
        """When everything has been cancelled nothing is held, and what was promised is free."""
        for number in self.asked:
            self.cancel(number, prefill=True, decode=True)
        self.go_on(20)
        for half in (self.decode, self.prefill):
            assert half.pool.num_free_blocks == NUM_BLOCKS
            assert half.ledger.num_reserved_blocks == 0
        assert (len(self.decoding), len(self.prefilling)) == (0, 0)
