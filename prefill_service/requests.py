"""The life of a request on a prefill worker, outside the engine thread: room first, then computing, then release.

A prompt reaches the engine only when the ledger grants all its blocks; until then it waits here, first come first
served. A prompt of this very worker's decode stage (colocated) lives under the reservation that stage made for it.
Runs on the event loop; speaks no protobuf.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.reservation import blocks_for_tokens
from pdserve.engine.events import SequenceReleased
from pdserve.engine.ledger import Demand, Denied, ReservationLedger
from pdserve.engine.step_loop import EngineThread
from prefill_service.prompt import PrefillJob
from prefill_service.stage import PrefillStage


class LocalDecode(Protocol):
    """The decode half of a colocated worker: whose reservation a local prompt lives under."""

    def begin_local(self, sequence_id: SequenceId, reservation_id: int, num_tokens: int) -> None:
        """A prefill of `num_tokens` tokens starts under the reservation.

        Raises:
            PdserveError: STALE, if it does not exist (any more); INVALID_ARGUMENT, if it is too small.
        """
        ...

    def end_local(self, sequence_id: SequenceId) -> None:
        """The prefill holds nothing of it any more."""
        ...


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """`local_reservation_id` is set where the decode target is this worker."""

    job: PrefillJob
    local_reservation_id: int | None = None


class PrefillRequests:
    """All requests this worker holds. `fail` reports a refusal to the coordinator."""

    def __init__(
        self,
        ledger: ReservationLedger,
        engine: EngineThread,
        stage: PrefillStage,
        fail: Callable[[SequenceId, PdserveError], None],
        local_decode: LocalDecode | None = None,
    ) -> None:
        self._ledger = ledger
        self._engine = engine
        self._stage = stage
        self._fail = fail
        self._local_decode = local_decode
        self._waiting: OrderedDict[SequenceId, PrefillRequest] = OrderedDict()
        self._in_engine: dict[SequenceId, PrefillRequest] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._in_engine)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(request.job.sequence.num_tokens for request in self._waiting.values())

    def submit(self, request: PrefillRequest) -> None:
        """Queue a prompt; what can never fit, or came for a reservation that is gone, is failed at once."""
        sequence = request.job.sequence
        if sequence.id in self._waiting or sequence.id in self._in_engine:
            return
        try:
            if request.local_reservation_id is not None:
                self._begin_local(sequence.id, request.local_reservation_id, sequence.num_tokens)
                self._start(request)
                return
            self._check_ever_fits(sequence.num_tokens)
        except PdserveError as error:
            self._fail(sequence.id, error)
            return
        self._waiting[sequence.id] = request
        self.admit_waiting()

    def cancel(self, sequence_id: SequenceId) -> None:
        """End a request in any phase; unknown ones are left alone."""
        if self._waiting.pop(sequence_id, None) is not None:
            self.admit_waiting()
        elif sequence_id in self._in_engine:
            self._engine.post(lambda: self._stage.cancel(sequence_id))

    def reap(self, now_s: float) -> None:
        """Fail those whose deadline passed while they waited for room."""
        late = [sequence_id for sequence_id, request in self._waiting.items() if request.job.deadline_s <= now_s]
        for sequence_id in late:
            error = PdserveError(
                ErrorReason.DEADLINE_EXCEEDED, "the deadline passed before there was room for the prompt"
            )
            self._fail(sequence_id, error)
            self.cancel(sequence_id)

    def cancel_coordinator(self, coordinator_incarnation: int) -> None:
        """A coordinator's stream ended: so do its requests."""
        for sequence_id in [*self._waiting, *self._in_engine]:
            if sequence_id.coordinator_incarnation == coordinator_incarnation:
                self.cancel(sequence_id)

    def fail_all(self, error: PdserveError) -> None:
        """The worker stops: say so to whoever waits, and free everything."""
        for sequence_id in [*self._waiting, *self._in_engine]:
            self._fail(sequence_id, error)
            self.cancel(sequence_id)

    def released(self, event: SequenceReleased) -> None:
        """The engine holds nothing of the sequence any more."""
        request = self._in_engine.pop(event.sequence_id, None)
        if request is None:
            return
        if request.local_reservation_id is not None:
            if self._local_decode is not None:
                self._local_decode.end_local(event.sequence_id)
        elif (reservation := self._ledger.of_sequence(event.sequence_id)) is not None:
            self._ledger.release(reservation.reservation_id)
        self.admit_waiting()

    def admit_waiting(self) -> None:
        """Start those at the head that fit now. Called whenever the ledger got blocks back."""
        while self._waiting:
            sequence_id, request = next(iter(self._waiting.items()))
            num_tokens = request.job.sequence.num_tokens
            # The lease is renewed by nobody: a prefill ends by its own deadline, or with its coordinator's stream.
            granted = self._ledger.reserve(sequence_id, Demand(num_tokens, num_tokens), now_s=float("inf"))
            if isinstance(granted, Denied):
                return
            del self._waiting[sequence_id]
            self._start(request)

    def _check_ever_fits(self, num_tokens: int) -> None:
        needed = blocks_for_tokens(num_tokens, self._ledger.block_size)
        if needed > self._ledger.num_usable_blocks:
            message = f"the prompt needs {needed} KV blocks, the prefill worker has {self._ledger.num_usable_blocks}"
            raise PdserveError(ErrorReason.NEVER_FITS, message)

    def _begin_local(self, sequence_id: SequenceId, reservation_id: int, num_tokens: int) -> None:
        if self._local_decode is None:
            raise PdserveError(ErrorReason.INCOMPATIBLE_PEER, "this worker has no decode role for a local transfer")
        self._local_decode.begin_local(sequence_id, reservation_id, num_tokens)

    def _start(self, request: PrefillRequest) -> None:
        self._in_engine[request.job.sequence.id] = request
        self._engine.post(lambda: self._stage.submit(request.job))
