"""One sequence from its place in the queue to its end: the only owner of everything acquired for it.

    queue ──turn──► Placer ──holds──► submit ──outputs──► end          a retryable failure before the first
      ▲                                                    │           token goes back to the queue's head, once
      └────────────────────────────────────────────────────┘

Outputs and stops arrive as plain calls; the task sleeps until `_concluded`, then leaves the holds.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from coordinator.fleet.membership import Fleet
from coordinator.fleet.values import Role, WorkerOutput
from coordinator.metrics import Metrics
from coordinator.scheduling.phases import PhaseStamps
from coordinator.scheduling.placing import Placement, Placer, PlacingConfig
from coordinator.scheduling.stream import IndexOrder, TokenStream, UnreadBound
from coordinator.scheduling.turnstile import Ticket, Turnstile
from coordinator.sequences import SequenceEnd, SequencePhase, SequenceRequest, SequenceTimings, TokenDelta
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.sampling import FinishReason

MAX_ATTEMPTS = 2
RETRYABLE = frozenset({ErrorReason.WORKER_LOST, ErrorReason.TRANSFER_FAILED, ErrorReason.DRAINING, ErrorReason.STALE})

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunContext:
    """What all runs of a coordinator share."""

    fleet: Fleet
    metrics: Metrics
    placing: PlacingConfig
    clock: Callable[[], float]
    new_id: Callable[[], SequenceId]
    unread: UnreadBound


@dataclass(slots=True)
class _Attempt:
    """`concluded` is done once there is nothing more to wait for; `retry` says whether to begin again.

    `committed`: the decode worker has the KV, and the prefill worker holds nothing more.
    """

    concluded: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    placement: Placement | None = None
    retry: bool = False
    committed: bool = False
    finish_reason: FinishReason | None = None
    num_output_tokens: int | None = None


class SequenceRun:
    def __init__(self, request: SequenceRequest, turnstile: Turnstile, ticket: Ticket, context: RunContext) -> None:
        self.request = request
        self._turnstile = turnstile
        self._ticket = ticket
        self._context = context
        self._order = IndexOrder(request.sampling.max_tokens)
        self._attempt = _Attempt()
        self._num_attempts = 0
        self._stamps = PhaseStamps(request.arrival_s)
        self._num_cached_tokens = 0
        self.stream = TokenStream(context.new_id(), context.unread, self._cancel, self.timings)

    @property
    def phase(self) -> SequencePhase:
        return self._stamps.phase

    @property
    def transferring(self) -> bool:
        """Whether its first token is out while its KV is still at the prefill worker."""
        placement = self._attempt.placement
        return self.phase is SequencePhase.DECODE and placement is not None and placement.prefill.held

    def timings(self) -> SequenceTimings:
        return self._stamps.timings(self._context.clock())

    async def run(self) -> None:
        """Never raises; the stream tells how it went."""
        remaining_s = self.request.deadline_s - self._context.clock()
        timer = asyncio.get_running_loop().call_later(max(0.0, remaining_s), self._expire)
        try:
            await self._run_once()
            while self._attempt.retry:
                self._begin_again()
                await self._run_once()
        except PdserveError as error:
            self._end(error)
        except Exception:
            logger.exception("sequence %s: its run failed", self.stream.id)
            self._end(PdserveError(ErrorReason.INTERNAL, "the coordinator failed to run the sequence"))
        finally:
            timer.cancel()
            self._ticket.leave()
            self._end(PdserveError(ErrorReason.INTERNAL, "the coordinator gave the sequence up"))

    def stop(self, error: PdserveError) -> None:
        """End it with `error`, in whatever phase; harmless after the end."""
        self._end(error)
        self._conclude()

    def _cancel(self) -> None:
        self.stop(PdserveError(ErrorReason.CANCELLED, "the sequence was cancelled"))

    def _expire(self) -> None:
        self.stop(PdserveError(ErrorReason.DEADLINE_EXCEEDED, f"the deadline passed in phase {self.phase.value}"))

    def _begin_again(self) -> None:
        self._context.metrics.retried(self.request.model)
        self._ticket = self._turnstile.join(self._ticket.entry, front=True)
        self._attempt = _Attempt()
        self._stamps = PhaseStamps(self.request.arrival_s)
        self._order = IndexOrder(self.request.sampling.max_tokens)

    async def _run_once(self) -> None:
        attempt = self._attempt
        self._num_attempts += 1
        with ExitStack() as holds:
            await asyncio.wait((self._ticket.turn, attempt.concluded), return_when=asyncio.FIRST_COMPLETED)
            if attempt.concluded.done():
                self._ticket.leave()
                return
            self._stamps.turn_s = self._context.clock()
            placement = await self._place(holds)
            self._ticket.leave()
            if placement is not None:
                self._submit(placement)
                await attempt.concluded

    async def _place(self, holds: ExitStack) -> Placement | None:
        context = self._context
        placer = Placer(context.fleet, context.placing, context.clock, self.request, context.new_id, self)
        return await placer.place(holds, self._attempt.concluded)

    def _submit(self, placement: Placement) -> None:
        """Decode first, so that it knows the sequence before its KV can arrive."""
        now_s = self._context.clock()
        remaining_s = self.request.deadline_s - now_s
        if remaining_s <= 0:
            self._expire()
        if self._attempt.concluded.done():
            return
        self._attempt.placement = placement
        self._stamps.placed_s = now_s
        prefill, decode, target = placement.prefill, placement.decode, placement.target
        self._stamps.prefill_worker = prefill.worker.info.key.worker_id
        if decode is not None and target is not None:
            self._stamps.decode_worker = decode.worker.info.key.worker_id
            decode.worker.client().submit_decode(decode.sequence_id, self.request, remaining_s, target.reservation_id)
        prefill.worker.client().submit_prefill(prefill.sequence_id, self.request, remaining_s, target)

    def on_lost(self, role: Role, error: PdserveError) -> None:
        """The worker that holds the sequence in `role` is gone."""
        if self._attempt.placement is not None:  # before that, the Placer notices by itself
            self._fail(error)

    def on_output(self, role: Role, output: WorkerOutput) -> None:
        """One worker's news, in any order relative to the other worker's."""
        placement = self._attempt.placement
        if placement is None or self._attempt.concluded.done():
            return
        hold = placement.prefill if role is Role.PREFILL else placement.decode
        if hold is not None and (output.finish_reason is not None or output.error is not None or output.transferred):
            hold.worker_done = True
        if output.error is not None:
            self._fail(output.error)
            return
        try:
            self._take(role, output)
        except PdserveError as error:
            self._fail(error)

    def _take(self, role: Role, output: WorkerOutput) -> None:
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        self._stamps.exposed_transfer_s = max(self._stamps.exposed_transfer_s, output.exposed_transfer_s)
        if output.finish_reason is not None:
            self._attempt.finish_reason = output.finish_reason
            self._attempt.num_output_tokens = output.first_index + len(output.token_ids)
        self._deliver(
            TokenDelta(
                output.first_index,
                output.token_ids,
                output.logprobs,
                output.prompt_logprobs,
                output.num_cached_tokens,
            )
        )
        if output.transferred or (role is Role.DECODE and output.token_ids):
            self._attempt.committed = True
        self._release_prefill()
        if self._attempt.finish_reason is not None and self._order.next_index == self._attempt.num_output_tokens:
            self._finish(self._attempt.finish_reason)

    def _release_prefill(self) -> None:
        """Done there, once its token is here too: decode's tokens may overtake it."""
        placement = self._attempt.placement
        if placement is not None and self._attempt.committed and self._order.next_index > 0:
            placement.prefill.worker_done = True
            placement.prefill.leave()

    def _deliver(self, delta: TokenDelta) -> None:
        for ready in self._order.push(delta):
            now_s, last_s = self._context.clock(), self._stamps.last_token_s
            self._stamps.last_token_s = now_s
            if self._stamps.first_token_s is None:
                self._stamps.first_token_s = now_s
                self._context.metrics.first_token(self.request.model, self.timings(), len(self.request.token_ids))
            since_s = None if last_s is None else now_s - last_s
            self._context.metrics.tokens(self.request.model, len(ready.token_ids), since_s)
            if not self.stream.deliver(ready, now_s):
                raise PdserveError(
                    ErrorReason.SLOW_CONSUMER, f"over {self._context.unread.max_tokens} tokens were left unread"
                )

    def _finish(self, reason: FinishReason) -> None:
        if self.stream.end is None:
            self._stamps.ended_s = self._context.clock()
            timings = self.timings()
            self.stream.finish(SequenceEnd(reason, timings, self._num_cached_tokens))
            e2e_s = self._stamps.ended_s - self.request.arrival_s
            self._context.metrics.finished(self.request.model, reason.value, timings, e2e_s)
        self._conclude()

    def _fail(self, error: PdserveError) -> None:
        """A worker's failure: tried again if nobody can have noticed, else the stream's end."""
        unnoticed = self._stamps.first_token_s is None and self.stream.end is None
        if unnoticed and error.reason in RETRYABLE and self._num_attempts < MAX_ATTEMPTS:
            self._attempt.retry = True
            self._conclude()
        else:
            self.stop(error)

    def _end(self, error: PdserveError) -> None:
        self._attempt.retry = False
        if self.stream.end is None:
            self._stamps.ended_s = self._context.clock()
            self.stream.finish(error)
            self._context.metrics.failed(self.request.model, error.reason.value)

    def _conclude(self) -> None:
        self._ticket.leave()
        if not self._attempt.concluded.done():
            self._attempt.concluded.set_result(None)
