"""Prompts on the engine thread: chunks in, first token and finished KV blocks out. One record a prompt.

A prompt's automaton, and who owns its blocks in each phase:

    QUEUED ────► COMPUTING ────► SENDING ────► (released)
    no blocks    SEQUENCE        OUTBOUND      free, cached, or the decode stage's (local hand-over)

A prompt begins with what the prefix cache has of it at that moment, and gives its own full blocks to the cache after
each step that computed them without a fault.

Blocks are handed to the transfer as chunks finish, but change hands only once: they are freed when computing has ended
and the transfer has ended, whichever comes last. A prompt that wants no transfer is released after its first token.
"""

import logging
from collections.abc import Sequence as Seq

from kv_transfer.interfaces import OutboundEnd
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import finish_reason_after
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
from prefill_service.prompt import PrefillJob, PrefillTotals, Prompt
from prefill_service.scheduler import PrefillScheduler

logger = logging.getLogger(__name__)


class PrefillStage:
    """See the module. Every method runs on the engine thread."""

    def __init__(self, scheduler: PrefillScheduler, resources: StageResources) -> None:
        self._scheduler = scheduler
        self._resources = resources
        self._pool = resources.pool
        self._block_size = resources.block_size
        self._eos_token_ids = resources.eos_token_ids
        self._events: list[Event] = []
        self._prompts: dict[SequenceId, Prompt] = {}
        self._planned_s = 0.0
        self.totals = PrefillTotals()

    # --- commands -----------------------------------------------------------------------------------------------------

    def submit(self, job: PrefillJob) -> None:
        """Queue a prompt. A second submit of one id is stale and changes nothing."""
        sequence = job.sequence
        if sequence.id in self._prompts:
            self.totals.num_stale += 1
            return
        prefix = self._resources.cached_prefix(job.group)
        self._prompts[sequence.id] = Prompt(job, prefix, num_sent_blocks=job.num_cached_blocks)
        num_cached = prefix.num_cached_tokens(sequence) if prefix is not None and _may_skip(sequence) else 0
        self._scheduler.add(sequence.id, sequence.num_tokens - num_cached)

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
        self.totals.count_transfer(end)
        if end.error is None:
            durations = Durations(transfer_s=end.duration_s, transfer_bytes=end.num_bytes)
            self._events.append(SequenceTransferred(end.sequence_id, durations))
        elif end.error.reason is not ErrorReason.CANCELLED:
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
        chosen = self._scheduler.schedule(lambda sequence_id: self._begin(self._prompts[sequence_id], now_s))
        for sequence_id, num_tokens in chosen:
            sequence = self._prompts[sequence_id].sequence
            end = sequence.num_computed_tokens + num_tokens
            num_new = blocks_for_tokens(end, self._block_size) - len(sequence.block_ids)
            sequence.block_ids += self._pool.allocate(num_new, self._prompts[sequence_id].owner)
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
            if result.sampled is not None and result.sampled.token_id is None:
                self._fail_on_nan(prompt)
                continue
            if prompt.prefix is not None:
                prompt.prefix.publish(chunk.sequence, prompt.owner)
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

    def _begin(self, prompt: Prompt, now_s: float) -> int:
        """Open the transfer, if there is to be one, and take what is cached; the number of tokens to compute, 0 if the
        transfer failed, and with it the prompt."""
        prompt.begin_s = now_s
        if prompt.job.open_transfer is not None:
            try:
                prompt.transfer = prompt.job.open_transfer()
            except PdserveError as error:
                self._fail(prompt, error)
            except RuntimeError as error:  # no thread to be had
                self._fail(prompt, PdserveError(ErrorReason.TRANSFER_FAILED, f"no transfer could start: {error}"))
        if not prompt.computing:
            return 0
        self._take_cached(prompt)
        self._send_finished_blocks(prompt)
        return prompt.sequence.num_remaining_tokens

    def _take_cached(self, prompt: Prompt) -> None:
        """Under a local reservation: what is pinned for it first becomes the prompt's own, so that it cannot go."""
        sequence = prompt.sequence
        if prompt.prefix is not None and _may_skip(sequence):
            prompt.num_cached_tokens = prompt.prefix.acquire(sequence, prompt.owner)
            self.totals.num_prefix_queries += sequence.num_tokens
            self.totals.num_prefix_hits += prompt.num_cached_tokens
        if prompt.job.local:
            self._pool.unpin(sequence.id)

    def _finish(self, prompt: Prompt, token: Sampled, now_s: float) -> None:
        sequence = prompt.sequence
        if token.token_id is None:
            raise RuntimeError("a prompt was finished without a token")
        sequence.token_ids.append(token.token_id)
        index = sequence.num_output_tokens - 1
        reason = finish_reason_after(token.token_id, index + 1, sequence.sampling, self._eos_token_ids)
        begin_s = prompt.begin_s if prompt.begin_s is not None else now_s
        durations = Durations(queue_s=begin_s - prompt.job.arrival_s, compute_s=now_s - begin_s)
        logprobs, prompt.logprobs = tuple(prompt.logprobs), []
        self._events.append(
            TokenSampled(
                sequence.id,
                index,
                token.token_id,
                token.logprobs,
                reason,
                durations,
                logprobs,
                prompt.num_cached_tokens,
            )
        )
        self.totals.num_completed += 1
        if reason is None and prompt.transfer is not None:
            self._stop_computing(prompt)
            self._send_finished_blocks(prompt)
            prompt.transfer.commit((token.token_id,))
        else:
            self._end(prompt, "finished with its first token")

    def _send_finished_blocks(self, prompt: Prompt) -> None:
        """Hand the transfer every block whose last token is computed; the partial last one when computing has ended."""
        if prompt.transfer is None or prompt.transfer_ended:
            return
        sequence = prompt.sequence
        num_full = sequence.num_computed_tokens // self._block_size
        num_final = num_full if prompt.computing else len(sequence.block_ids)
        if num_final > prompt.num_sent_blocks:
            prompt.transfer.send(sequence.block_ids[prompt.num_sent_blocks : num_final])
            prompt.num_sent_blocks = num_final

    def _fail_on_nan(self, prompt: Prompt) -> None:
        """None of its KV is to be trusted, nor what was cached of it before the fault showed."""
        self.totals.num_nan_rows += 1
        if prompt.prefix is not None:
            prompt.prefix.retract(prompt.sequence, prompt.owner)
        self._fail(prompt, PdserveError(ErrorReason.NUMERICAL_ERROR, "the logits held a NaN or an infinity"))

    def _fail(self, prompt: Prompt, error: PdserveError) -> None:
        self.totals.num_failed += 1
        self._events.append(SequenceFailed(prompt.sequence.id, error))
        self._end(prompt, error.reason.value)

    def _end(self, prompt: Prompt, reason: str) -> None:
        """Stop computing; abort the transfer if one is open; release the blocks once no transfer can read them."""
        sequence = prompt.sequence
        self._scheduler.remove(sequence.id)
        if prompt.computing:
            self._stop_computing(prompt)
        if prompt.transfer is not None and not prompt.transfer_ended:
            prompt.transfer.abort(reason)
            return
        self._pool.free(sequence.block_ids, prompt.owner)
        del self._prompts[sequence.id]
        self._events.append(SequenceReleased(sequence.id))

    def _stop_computing(self, prompt: Prompt) -> None:
        old = prompt.owner
        prompt.computing = False
        self._pool.hand_over(prompt.sequence.block_ids, old, prompt.owner)


def _may_skip(sequence: Sequence) -> bool:
    """Whether tokens may be left uncomputed: not where the prompt's own logprobs are asked for."""
    return sequence.sampling.num_prompt_logprobs is None
