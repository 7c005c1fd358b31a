"""The life of a request on a decode worker, outside the engine thread: reserve, receive, decode, release.

The reservation is given back when the request has ended *and* neither a transfer nor the engine can still touch one of
its blocks; with it goes what it still pins of the prefix cache. Runs on the event loop; speaks no protobuf.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from decode_service.entry import DecodeJob
from decode_service.stage import DecodeStage
from pdserve.core.block_keys import COMMON_GROUP, PrefixGroup
from pdserve.core.errors import ErrorReason, PdserveError, invalid
from pdserve.core.ids import SequenceId
from pdserve.core.reservation import blocks_for_tokens
from pdserve.engine.ledger import Demand, Denied, Reservation, ReservationLedger
from pdserve.engine.step_loop import EngineThread


@dataclass(frozen=True, slots=True)
class Prompt:
    """What Reserve is told of the sequence to come, so that what is cached of it can be held."""

    token_ids: Seq[int] = ()
    group: PrefixGroup = COMMON_GROUP


NO_PROMPT = Prompt()


@dataclass(slots=True, eq=False)
class _Request:
    """`num_cached_blocks` were pinned when room was reserved: they need not come."""

    reservation: Reservation
    num_cached_blocks: int = 0
    submitted: bool = False
    ended: bool = False
    engine_released: bool = False
    inbound_open: bool = False
    has_kv: bool = False


class DecodeRequests:
    """All requests this worker holds.

    Args:
        fail: reports a refusal to the coordinator.
        ledger_changed: blocks were given back.
        cancel_inbound: whoever writes KV under the reservation must stop, if anybody does; `inbound_ended` is called
            once no write is under way. Set after construction, because transports need this object first.
    """

    def __init__(
        self,
        ledger: ReservationLedger,
        engine: EngineThread,
        stage: DecodeStage,
        fail: Callable[[SequenceId, PdserveError], None],
        ledger_changed: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._engine = engine
        self._stage = stage
        self._fail = fail
        self._ledger_changed = ledger_changed
        self._requests: dict[SequenceId, _Request] = {}
        self.cancel_inbound: Callable[[Reservation], object] = lambda _: None
        self.num_stale = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_receiving(self) -> int:
        return sum(request.inbound_open for request in self._requests.values())

    # --- from the coordinator -----------------------------------------------------------------------------------------

    def reserve(
        self, sequence_id: SequenceId, demand: Demand, now_s: float, deadline_s: float, prompt: Prompt = NO_PROMPT
    ) -> Reservation | Denied:
        """Promise blocks for a whole life, and hold what is cached of the prompt; or say at once what is missing.

        Raises:
            PdserveError: STALE, for a sequence that has ended but still holds blocks.
        """
        request = self._requests.get(sequence_id)
        if request is not None and request.ended:
            raise PdserveError(ErrorReason.STALE, "the sequence has ended here")
        answer = self._ledger.reserve(sequence_id, demand, now_s, deadline_s)
        if isinstance(answer, Reservation) and request is None:
            pinned = self._stage.pin_prefix(sequence_id, prompt.token_ids, prompt.group, answer.num_blocks)
            self._requests[sequence_id] = _Request(answer, pinned)
        return answer

    def num_cached_blocks(self, sequence_id: SequenceId) -> int:
        """How many of its first blocks were here when room was reserved for the sequence."""
        request = self._requests.get(sequence_id)
        return 0 if request is None else request.num_cached_blocks

    def submit(self, job: DecodeJob, reservation_id: int) -> None:
        """Expect a sequence's KV and go on from it. Without a reservation that is large enough it is failed."""
        try:
            request = self._live(job.sequence_id, reservation_id)
            self._check_reserved(job, request.reservation)
        except PdserveError as error:
            self.refuse(job.sequence_id, error)
            return
        if request.submitted:
            self.num_stale += 1
            return
        request.submitted = True
        job = replace(job, num_blocks=request.reservation.num_blocks)
        self._engine.post(lambda: self._stage.submit(job))

    def refuse(self, sequence_id: SequenceId, error: PdserveError) -> None:
        """Fail a sequence that cannot be taken, or kept, and give back what was reserved for it, if anything was."""
        self._fail(sequence_id, error)
        self.cancel(sequence_id)

    def cancel(self, sequence_id: SequenceId) -> None:
        """End a request in any phase and give everything back; unknown ones are stale and change nothing."""
        request = self._requests.get(sequence_id)
        if request is None or request.ended:
            self.num_stale += 1
            return
        self._end(request)
        self._engine.post(lambda: self._stage.cancel(sequence_id))

    def renew(self, coordinator_incarnation: int, now_s: float) -> None:
        self._ledger.renew(coordinator_incarnation, now_s)

    def reap(self, now_s: float) -> None:
        """End what no coordinator renews any more, and what has passed its deadline."""
        for reservation in self._ledger.expired(now_s):
            request = self._requests.get(reservation.sequence_id)
            if request is None or request.ended:
                continue
            if reservation.deadline_s <= now_s:
                error = PdserveError(ErrorReason.DEADLINE_EXCEEDED, "the deadline passed on the decode worker")
            else:
                error = PdserveError(ErrorReason.WORKER_LOST, "the lease lapsed: no word came from the coordinator")
            self.refuse(reservation.sequence_id, error)

    def cancel_coordinator(self, coordinator_incarnation: int) -> None:
        """A coordinator's stream ended: so do its requests."""
        for sequence_id in list(self._requests):
            if sequence_id.coordinator_incarnation == coordinator_incarnation and not self._requests[sequence_id].ended:
                self.cancel(sequence_id)

    def fail_all(self, error: PdserveError) -> None:
        """The worker stops: say so to whoever waits, and free everything."""
        for sequence_id, request in list(self._requests.items()):
            if not request.ended:
                self._fail(sequence_id, error)
                self.cancel(sequence_id)

    # --- from transfers -----------------------------------------------------------------------------------------------

    def begin_inbound(self, sequence_id: SequenceId, reservation_id: int, num_blocks: int) -> None:
        """A writer of `num_blocks` blocks may start.

        Raises:
            PdserveError: STALE, without a live reservation, or if its KV is here already; or, with a time to ask again,
                while an earlier writer's blocks are on their way back. INVALID_ARGUMENT, if the reservation is too
                small.
        """
        request = self._live(sequence_id, reservation_id)
        self._open_inbound(request, request.num_cached_blocks + num_blocks)

    def check_live(self, sequence_id: SequenceId, reservation_id: int) -> None:
        """Refuse what came too late. From any thread.

        Raises:
            PdserveError: STALE, if the request has ended or is unknown.
        """
        self._live(sequence_id, reservation_id)

    def inbound_ended(self, sequence_id: SequenceId, *, adopted: bool = False) -> None:
        """No writer can touch the sequence's blocks any more: they were adopted, or given back to the pool."""
        request = self._requests.get(sequence_id)
        if request is None:
            self.num_stale += 1
            return
        request.inbound_open = False
        request.has_kv |= adopted
        self._settle(sequence_id, request)

    def begin_local(self, sequence_id: SequenceId, reservation_id: int, num_tokens: int) -> None:
        """This worker's own prefill starts to write under the reservation; raises as `begin_inbound`.

        It takes from the cache by itself, and then gives up what is pinned for the sequence.
        """
        request = self._live(sequence_id, reservation_id)
        self._open_inbound(request, blocks_for_tokens(num_tokens, self._ledger.block_size))

    def end_local(self, sequence_id: SequenceId) -> None:
        """This worker's own prefill holds nothing of the sequence any more; there will be no second one."""
        self.inbound_ended(sequence_id, adopted=True)

    # --- from the engine ----------------------------------------------------------------------------------------------

    def engine_released(self, sequence_id: SequenceId) -> None:
        """The engine holds nothing of the sequence any more: finished, failed or cancelled.

        Unless its KV arrives at this very moment: a transfer that is still open may have been adopted after this was
        said. A cancel, queued behind that, makes sure; the engine answers it with the same news.
        """
        request = self._requests.get(sequence_id)
        if request is None:
            return
        if not request.ended:
            self._end(request)
            if request.inbound_open:
                self._engine.post(lambda: self._stage.cancel(sequence_id))
                return
        request.engine_released = True
        self._settle(sequence_id, request)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _live(self, sequence_id: SequenceId, reservation_id: int) -> _Request:
        request = self._requests.get(sequence_id)
        if request is None or request.ended or request.reservation.reservation_id != reservation_id:
            raise PdserveError(ErrorReason.STALE, "there is no such reservation (any more)")
        return request

    def _open_inbound(self, request: _Request, num_blocks: int) -> None:
        if request.has_kv:
            raise PdserveError(ErrorReason.STALE, "the sequence has its KV already")
        if request.inbound_open:
            message = "an earlier transfer of the sequence is still giving its blocks back"
            raise PdserveError(ErrorReason.STALE, message, retry_after_s=0.02)
        reserved = request.reservation.num_blocks
        if num_blocks > reserved:
            raise invalid(f"{num_blocks} blocks wanted under a reservation of {reserved}", "num_blocks")
        request.inbound_open = True

    def _check_reserved(self, job: DecodeJob, reservation: Reservation) -> None:
        needed = blocks_for_tokens(job.num_prompt_tokens + job.sampling.max_tokens, self._ledger.block_size)
        if needed > reservation.num_blocks:
            raise invalid(f"{needed} blocks needed, {reservation.num_blocks} reserved", "reservation_id")

    def _end(self, request: _Request) -> None:
        request.ended = True
        if request.inbound_open:
            self.cancel_inbound(request.reservation)

    def _settle(self, sequence_id: SequenceId, request: _Request) -> None:
        if request.engine_released and not request.inbound_open:
            del self._requests[sequence_id]
            self._stage.unpin_prefix(sequence_id)
            self._ledger.release(request.reservation.reservation_id)
            self._ledger_changed()
