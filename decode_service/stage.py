"""Sequences on the engine thread, from their KV's arrival to their last token. One record a sequence.

A sequence's automaton, and who owns its blocks in each phase. Submit and KV arrive over different connections, in
either order:

    (allocate) ─► RECEIVING ─► COMMITTED ─┬─► DECODING ─► (released)
                  INBOUND      SEQUENCE   │   SEQUENCE    free, or cached
    (submit) ───► EXPECTED ───────────────┘
                  no blocks

The receiver returns INBOUND blocks through `release_inbound`; everything else is freed here, once. Cached blocks that
were pinned at Reserve are the sequence's own with the commit, as the first of its block table; until then they are the
reservation's.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace

from decode_service.entry import DecodeJob, DecodeTotals, Entry
from decode_service.scheduler import DecodeScheduler
from kv_transfer.interfaces import InboundCommit
from pdserve.core.block_keys import PrefixGroup
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import finish_reason_after
from pdserve.engine.block_pool import OutOfBlocksError, Owner, OwnerKind
from pdserve.engine.events import Durations, Event, SequenceFailed, SequenceReleased, StageSnapshot, TokenSampled
from pdserve.engine.sequence import Chunk, ChunkResult, Sampled, Sequence
from pdserve.engine.step_loop import StageResources


class DecodeStage:
    """See the module. Every method runs on the engine thread, but for those that say otherwise."""

    def __init__(self, scheduler: DecodeScheduler, resources: StageResources) -> None:
        self._scheduler = scheduler
        self._resources = resources
        self._pool = resources.pool
        self._block_size = resources.block_size
        self._eos_token_ids = resources.eos_token_ids
        self._events: list[Event] = []
        self._entries: dict[SequenceId, Entry] = {}
        self._planned_s = 0.0
        self.totals = DecodeTotals()

    # --- what a reservation holds, from any thread --------------------------------------------------------------------

    def pin_prefix(self, sequence_id: SequenceId, token_ids: Seq[int], group: PrefixGroup, max_blocks: int) -> int:
        """Hold what is cached of a prompt, at most `max_blocks`, for a sequence that has room reserved; the number of
        blocks. All of its full blocks may be here: this stage computes none of the prompt's."""
        prefix = self._resources.cached_prefix(group)
        if prefix is None:
            return 0
        num_blocks = min(len(token_ids) // self._block_size, max_blocks)
        prefix.chain.extend(token_ids, num_blocks)
        return self._pool.pin(prefix.chain, num_blocks, sequence_id)

    def unpin_prefix(self, sequence_id: SequenceId) -> None:
        """The reservation ends: give up what it still holds, if anything."""
        self._pool.unpin(sequence_id)

    # --- inbound KV ---------------------------------------------------------------------------------------------------

    def allocate_inbound(self, sequence_id: SequenceId, num_blocks: int) -> tuple[int, ...]:
        """Blocks for a transfer to write to; the caller has checked the reservation. From any thread.

        Raises:
            PdserveError: QUEUE_FULL while an earlier transfer of the sequence is still giving its blocks back.
        """
        try:
            return tuple(self._pool.allocate(num_blocks, Owner(OwnerKind.INBOUND, sequence_id)))
        except OutOfBlocksError as error:
            message = "an earlier transfer still holds the blocks"
            raise PdserveError(ErrorReason.QUEUE_FULL, message, retry_after_s=0.05) from error

    def release_inbound(self, sequence_id: SequenceId, block_ids: Seq[int]) -> None:
        """The transfer ended without a commit, and nobody can write to the blocks any more."""
        self._pool.free(block_ids, Owner(OwnerKind.INBOUND, sequence_id))

    def adopt(self, commit: InboundCommit, from_kind: OwnerKind, now_s: float) -> None:
        """Take over verified blocks from `from_kind`: those of the tokens that are not pinned here. Decoding starts
        with the next step, or once submitted.

        Raises:
            PdserveError: STALE, if the sequence has KV already; TRANSFER_FAILED, if the blocks are not those of the
                tokens. The blocks stay with their owner.
        """
        entry = self._entries.get(commit.sequence_id) or Entry(commit.sequence_id)
        if entry.commit is not None:
            self.totals.num_stale += 1
            raise PdserveError(ErrorReason.STALE, "the sequence has its KV already")
        num_pinned = self._pool.num_pinned(commit.sequence_id)
        if num_pinned + len(commit.block_ids) != blocks_for_tokens(commit.num_tokens, self._block_size):
            message = f"{len(commit.block_ids)} blocks came for {commit.num_tokens} tokens, {num_pinned} were here"
            raise PdserveError(ErrorReason.TRANSFER_FAILED, message)
        self._entries[commit.sequence_id] = entry
        self._pool.hand_over(commit.block_ids, Owner(from_kind, commit.sequence_id), entry.owner)
        entry.block_ids = [*self._pool.claim(entry.owner), *commit.block_ids]
        entry.commit, entry.committed_s = commit, now_s
        if from_kind is OwnerKind.INBOUND and self._resources.prefix_scope is not None:
            self.totals.num_prefix_queries += commit.num_tokens
            self.totals.num_prefix_hits += num_pinned * self._block_size
        self._start_if_complete(entry)

    # --- commands -----------------------------------------------------------------------------------------------------

    def submit(self, job: DecodeJob) -> None:
        """Expect a sequence. A second submit of one id is stale and changes nothing."""
        entry = self._entries.setdefault(job.sequence_id, Entry(job.sequence_id))
        if entry.job is not None:
            self.totals.num_stale += 1
            return
        entry.job = job
        self._start_if_complete(entry)

    def cancel(self, sequence_id: SequenceId) -> None:
        """End a sequence in any phase and say so with SequenceReleased, also if it is unknown here."""
        entry = self._entries.get(sequence_id)
        if entry is None:
            self._events.append(SequenceReleased(sequence_id))
            return
        self.totals.num_cancelled += 1
        self._release(entry)

    # --- the step -----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._scheduler.num_running + self._scheduler.num_waiting > 0

    def snapshot(self) -> StageSnapshot:
        sequences = (entry.sequence for entry in self._entries.values())
        return StageSnapshot(
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_running_tokens=sum(sequence.num_tokens for sequence in sequences if sequence is not None),
        )

    def plan(self, now_s: float) -> list[Chunk]:
        self._planned_s = now_s
        self._expire(now_s)
        batch, joined = self._scheduler.schedule()
        for sequence_id in joined:
            self._join(self._entries[sequence_id], now_s)
        return [self._next_row(self._entries[sequence_id]) for sequence_id in batch]

    def apply(self, chunks: Seq[Chunk], results: Seq[ChunkResult], now_s: float) -> None:
        if chunks:
            self.totals.compute_s += now_s - self._planned_s
        for chunk, result in zip(chunks, results, strict=True):
            if result.sampled is None:
                raise RuntimeError("a decode row came back without a token")
            chunk.sequence.num_computed_tokens += 1
            self._advance(self._entries[chunk.sequence.id], result.sampled, now_s)

    def fail(self, chunks: Seq[Chunk], error: Exception) -> None:
        for chunk in chunks:
            message = f"the forward pass failed: {type(error).__name__}"
            self._fail(self._entries[chunk.sequence.id], PdserveError(ErrorReason.INTERNAL, message))

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # --- inside -------------------------------------------------------------------------------------------------------

    def _start_if_complete(self, entry: Entry) -> None:
        job, commit = entry.job, entry.commit
        if job is None or commit is None:
            return
        token_ids = [*job.token_ids, *commit.output_token_ids]
        sequence = entry.sequence = Sequence(
            job.sequence_id, token_ids, job.num_prompt_tokens, job.sampling, entry.block_ids, commit.num_tokens
        )
        if sequence.num_remaining_tokens != 1:
            message = f"KV of {commit.num_tokens} tokens came for a sequence of {len(token_ids)}"
            self._fail(entry, PdserveError(ErrorReason.TRANSFER_FAILED, message))
            return
        prefix = entry.prefix = self._resources.cached_prefix(job.group)
        if prefix is not None:
            if not prefix.adopt(sequence):
                message = "blocks that were cached here are not those of the sequence"
                self._fail(entry, PdserveError(ErrorReason.TRANSFER_FAILED, message))
                return
            prefix.publish(sequence, entry.owner)
        self._scheduler.add(job.sequence_id)

    def _join(self, entry: Entry, now_s: float) -> None:
        entry.joined_s = now_s
        since_prefill_end_s = entry.commit.since_prefill_end_s if entry.commit is not None else 0.0
        entry.durations = Durations(exposed_transfer_s=since_prefill_end_s + now_s - entry.committed_s)
        self.totals.exposed_transfer_s += entry.durations.exposed_transfer_s

    def _next_row(self, entry: Entry) -> Chunk:
        """One token to compute; its block is allocated under the reservation, so this cannot fail."""
        sequence, job = entry.sequence, entry.job
        if sequence is None or job is None:
            raise RuntimeError("an incomplete sequence was scheduled")
        num_blocks = len(sequence.block_ids)
        if sequence.num_computed_tokens == num_blocks * self._block_size:
            if num_blocks == job.num_blocks:
                raise RuntimeError(f"sequence {sequence.id} outgrows its reservation of {job.num_blocks} blocks")
            sequence.block_ids += self._pool.allocate(1, entry.owner)
        return Chunk(sequence, 1, sample=True)

    def _advance(self, entry: Entry, token: Sampled, now_s: float) -> None:
        sequence = entry.sequence
        if sequence is None:
            raise RuntimeError("a row of an incomplete sequence was run")
        if token.token_id is None:
            self.totals.num_nan_rows += 1
            if entry.prefix is not None:
                entry.prefix.retract(sequence, entry.owner)
            self._fail(entry, PdserveError(ErrorReason.NUMERICAL_ERROR, "the logits held a NaN or an infinity"))
            return
        if entry.prefix is not None:
            entry.prefix.publish(sequence, entry.owner)
        sequence.token_ids.append(token.token_id)
        self.totals.num_tokens += 1
        index = sequence.num_output_tokens - 1
        reason = finish_reason_after(token.token_id, index + 1, sequence.sampling, self._eos_token_ids)
        durations = entry.durations if reason is None else replace(entry.durations, compute_s=now_s - entry.joined_s)
        self._events.append(TokenSampled(sequence.id, index, token.token_id, token.logprobs, reason, durations))
        if reason is not None:
            self.totals.num_completed += 1
            self._release(entry)

    def _expire(self, now_s: float) -> None:
        late = [e for e in self._entries.values() if e.job is not None and e.job.deadline_s <= now_s]
        for entry in late:
            self._fail(entry, PdserveError(ErrorReason.DEADLINE_EXCEEDED, "the deadline passed while decoding"))

    def _fail(self, entry: Entry, error: PdserveError) -> None:
        self.totals.num_failed += 1
        self._events.append(SequenceFailed(entry.sequence_id, error))
        self._release(entry)

    def _release(self, entry: Entry) -> None:
        sequence_id = entry.sequence_id
        self._scheduler.remove(sequence_id)
        self._pool.free(entry.block_ids if entry.sequence is None else entry.sequence.block_ids, entry.owner)
        del self._entries[sequence_id]
        self._events.append(SequenceReleased(sequence_id))
