"""Prompts on the engine thread: chunks in, first token and finished KV blocks out. One record a prompt.

A prompt's automaton, and who owns its blocks in each phase:

    QUEUED ────► COMPUTING ────► SENDING ────► (released)
    no blocks    SEQUENCE        OUTBOUND      free, or the decode stage's (local hand-over)

Blocks are handed to the transfer as chunks finish, but change hands only once: they are freed when computing has ended
and the transfer has ended, whichever comes last. A prompt that wants no transfer is released after its first token.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from kv_transfer.interfaces import OutboundEnd, OutboundTransfer
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import TokenLogprobs, finish_reason_after
from pdserve.engine.block_pool import Owner, OwnerKind
from pdserve.engine.events import (
    Durations,
    Event,
    SequenceFailed,
    SequenceReleased,
    SequenceTransferred,
    StageSnapshot,
    TokenSampled,
)
from pdserve.engine.sequence import Chunk, ChunkResult, Sampled, Sequence
from pdserve.engine.step_loop import StageResources
from prefill_service.scheduler import PrefillScheduler

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PrefillTotals:
    """Since the worker started. `compute_s`: the time of the steps that computed any of `num_tokens`."""

    num_tokens: int = 0
    num_completed: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_stale: int = 0
    num_nan_rows: int = 0
    num_transfers: int = 0
    num_transfers_failed: int = 0
    num_transferred_bytes: int = 0
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """A prompt to compute. `open_transfer` starts its transfer (None: one token is wanted and no KV leaves).

    With `local` the transfer hands the blocks themselves to the decode stage, which then owns them. The first
    `num_cached_blocks` are not sent: the decode worker has them.
    """

    sequence: Sequence
    deadline_s: float
    arrival_s: float
    open_transfer: Callable[[], OutboundTransfer] | None
    local: bool = False
    num_cached_blocks: int = 0


@dataclass(slots=True, eq=False)
class _Prompt:
    job: PrefillJob
    transfer: OutboundTransfer | None = None
    transfer_ended: bool = False
    computing: bool = True
    num_sent_blocks: int = 0
    begin_s: float | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])

    @property
    def sequence(self) -> Sequence:
        return self.job.sequence


class PrefillStage:
    """See the module. Every method runs on the engine thread."""

    def __init__(self, scheduler: PrefillScheduler, resources: StageResources) -> None:
        self._scheduler = scheduler
        self._pool = resources.pool
        self._block_size = resources.block_size
        self._eos_token_ids = resources.eos_token_ids
        self._events: list[Event] = []
        self._prompts: dict[SequenceId, _Prompt] = {}
        self._planned_s = 0.0
        self.totals = PrefillTotals()

    # --- commands -----------------------------------------------------------------------------------------------------

    def submit(self, job: PrefillJob) -> None:
        """Queue a prompt. A second submit of one id is stale and changes nothing."""
        sequence = job.sequence
        if sequence.id in self._prompts:
            self.totals.num_stale += 1
            return
        self._prompts[sequence.id] = _Prompt(job, num_sent_blocks=job.num_cached_blocks)
        self._scheduler.add(sequence.id, sequence.num_remaining_tokens)

    def cancel(self, sequence_id: SequenceId) -> None:
        """End a prompt in any phase; unknown ids are stale and change nothing."""
        prompt = self._prompts.get(sequence_id)
        if prompt is None:
            self.totals.num_stale += 1
            return
        if prompt.computing:
            self.totals.num_cancelled += 1
        self._end(prompt, "cancelled")

    def transfer_ended(self, end: OutboundEnd) -> None:
        """The transfer's one and only end: committed, failed or aborted."""
        prompt = self._prompts.get(end.sequence_id)
        if prompt is None or prompt.transfer_ended:
            self.totals.num_stale += 1
            return
        prompt.transfer_ended = True
        self.totals.num_transferred_bytes += end.num_bytes
        if end.error is None:
            self.totals.num_transfers += 1
            durations = Durations(transfer_s=end.duration_s, transfer_bytes=end.num_bytes)
            self._events.append(SequenceTransferred(end.sequence_id, durations))
        elif end.error.reason is not ErrorReason.CANCELLED:
            self.totals.num_transfers_failed += 1
            self._events.append(SequenceFailed(end.sequence_id, end.error))
        if prompt.job.local and end.error is None:
            prompt.sequence.block_ids = []  # they are the decode stage's now
        self._end(prompt, "transfer ended")

    # --- the step -----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return len(self._scheduler) > 0

    def snapshot(self) -> StageSnapshot:
        computing = [prompt for prompt in self._prompts.values() if prompt.computing]
        num_waiting = sum(prompt.begin_s is None for prompt in computing)
        return StageSnapshot(
            num_waiting=num_waiting,
            num_running=len(computing) - num_waiting,
            num_transferring=len(self._prompts) - len(computing),
            num_queued_tokens=self._scheduler.num_queued_tokens,
        )

    def plan(self, now_s: float) -> list[Chunk]:
        self._planned_s = now_s
        self._expire(now_s)
        chunks: list[Chunk] = []
        for sequence_id, num_tokens in self._scheduler.schedule():
            prompt = self._prompts[sequence_id]
            sequence = prompt.sequence
            if prompt.begin_s is None and not self._begin(prompt, now_s):
                continue
            end = sequence.num_computed_tokens + num_tokens
            num_new = blocks_for_tokens(end, self._block_size) - len(sequence.block_ids)
            sequence.block_ids += self._pool.allocate(num_new, Owner(OwnerKind.SEQUENCE, sequence_id))
            chunks.append(Chunk(sequence, num_tokens, sample=end == sequence.num_tokens))
        return chunks

    def apply(self, chunks: Seq[Chunk], results: Seq[ChunkResult], now_s: float) -> None:
        if chunks:
            self.totals.compute_s += now_s - self._planned_s
        for chunk, result in zip(chunks, results, strict=True):
            prompt = self._prompts[chunk.sequence.id]
            chunk.sequence.num_computed_tokens += chunk.num_tokens
            prompt.logprobs += result.prompt_logprobs
            self.totals.num_tokens += chunk.num_tokens
            if result.sampled is None:
                self._send_finished_blocks(prompt)
            else:
                self._finish(prompt, result.sampled, now_s)

    def fail(self, chunks: Seq[Chunk], error: Exception) -> None:
        for chunk in chunks:
            message = f"the forward pass failed: {type(error).__name__}"
            self._fail(self._prompts[chunk.sequence.id], PdserveError(ErrorReason.INTERNAL, message))

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # --- inside -------------------------------------------------------------------------------------------------------

    def _expire(self, now_s: float) -> None:
        late = [p for p in self._prompts.values() if p.computing and p.job.deadline_s <= now_s]
        for prompt in late:
            self._fail(
                prompt, PdserveError(ErrorReason.DEADLINE_EXCEEDED, "the deadline passed before the first token")
            )

    def _begin(self, prompt: _Prompt, now_s: float) -> bool:
        """Open the transfer, if there is to be one; false if that failed, and with it the prompt."""
        prompt.begin_s = now_s
        if prompt.job.open_transfer is not None:
            try:
                prompt.transfer = prompt.job.open_transfer()
            except PdserveError as error:
                self._fail(prompt, error)
            except RuntimeError as error:  # no thread to be had
                self._fail(prompt, PdserveError(ErrorReason.TRANSFER_FAILED, f"no transfer could start: {error}"))
        return prompt.computing

    def _finish(self, prompt: _Prompt, token: Sampled, now_s: float) -> None:
        if token.token_id is None:
            self.totals.num_nan_rows += 1
            self._fail(prompt, PdserveError(ErrorReason.NUMERICAL_ERROR, "the logits held a NaN or an infinity"))
            return
        sequence = prompt.sequence
        sequence.token_ids.append(token.token_id)
        index = sequence.num_output_tokens - 1
        reason = finish_reason_after(token.token_id, index + 1, sequence.sampling, self._eos_token_ids)
        begin_s = prompt.begin_s if prompt.begin_s is not None else now_s
        durations = Durations(queue_s=begin_s - prompt.job.arrival_s, compute_s=now_s - begin_s)
        logprobs, prompt.logprobs = tuple(prompt.logprobs), []
        self._events.append(
            TokenSampled(sequence.id, index, token.token_id, token.logprobs, reason, durations, logprobs)
        )
        self.totals.num_completed += 1
        if reason is None and prompt.transfer is not None:
            self._stop_computing(prompt)
            self._send_finished_blocks(prompt)
            prompt.transfer.commit((token.token_id,))
        else:
            self._end(prompt, "finished with its first token")

    def _send_finished_blocks(self, prompt: _Prompt) -> None:
        """Hand the transfer every block whose last token is computed; the partial last one when computing has ended."""
        if prompt.transfer is None or prompt.transfer_ended:
            return
        sequence = prompt.sequence
        num_full = sequence.num_computed_tokens // self._block_size
        num_final = num_full if prompt.computing else len(sequence.block_ids)
        if num_final > prompt.num_sent_blocks:
            prompt.transfer.send(sequence.block_ids[prompt.num_sent_blocks : num_final])
            prompt.num_sent_blocks = num_final

    def _fail(self, prompt: _Prompt, error: PdserveError) -> None:
        self.totals.num_failed += 1
        self._events.append(SequenceFailed(prompt.sequence.id, error))
        self._end(prompt, error.reason.value)

    def _end(self, prompt: _Prompt, reason: str) -> None:
        """Stop computing; abort the transfer if one is open; release the blocks once no transfer can read them."""
        sequence = prompt.sequence
        self._scheduler.remove(sequence.id)
        if prompt.computing:
            self._stop_computing(prompt)
        if prompt.transfer is not None and not prompt.transfer_ended:
            prompt.transfer.abort(reason)
            return
        self._pool.free(sequence.block_ids, Owner(OwnerKind.OUTBOUND, sequence.id))
        del self._prompts[sequence.id]
        self._events.append(SequenceReleased(sequence.id))

    def _stop_computing(self, prompt: _Prompt) -> None:
        sequence_id = prompt.sequence.id
        prompt.computing = False
        old, new = Owner(OwnerKind.SEQUENCE, sequence_id), Owner(OwnerKind.OUTBOUND, sequence_id)
        self._pool.hand_over(prompt.sequence.block_ids, old, new)
