"""Runs chunks on the model: one ragged forward a step, then sampling. Schedules nothing and owns no block."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import SamplingParams, TokenLogprobs
from pdserve.engine.model.interface import Int32s, Model, Profile, StepInput
from pdserve.engine.paged_kv import PagedKv
from pdserve.engine.sampler import raw_logprobs, sample_rows
from pdserve.engine.sequence import Chunk, ChunkResult, Sampled, Sequence

SCORED_ROWS = 32
"""Rows of prompt logits held at a time: with a vocabulary of 262,144, 32 MiB, and twice that to score them."""


class ModelRunner:
    """See `interfaces.Runner`."""

    def __init__(self, model: Model, paged_kv: PagedKv) -> None:
        self._model = model
        self._paged_kv = paged_kv
        self._eos_token_ids = frozenset(model.config.eos_token_ids)

    def run(self, chunks: Seq[Chunk]) -> list[ChunkResult]:
        if not chunks:
            return []
        spans = _Spans(chunks)
        self._check(chunks, spans)
        logits = self._model.forward(self._step_input(chunks, spans), self._paged_kv.pool)
        sequences = [chunk.sequence for chunk in chunks if chunk.sample]
        sampled = iter(sample_rows(logits, sequences, self._eos_token_ids) if sequences else [])
        scores = {
            index: self._score_prompt(chunk, int(spans.starts[index]))
            for index, chunk in enumerate(chunks)
            if chunk.sequence.sampling.num_prompt_logprobs is not None
        }
        results = [ChunkResult(next(sampled) if chunk.sample else None) for chunk in chunks]
        for index, scored in scores.items():
            results[index] = (
                ChunkResult(Sampled(None)) if scored is None else ChunkResult(results[index].sampled, tuple(scored))
            )
        return results

    def warm_up(self, num_tokens: int) -> None:
        """Run one prompt of up to `num_tokens` and one decode row, so that the first request does not pay for it.

        Call before any block is handed out: it writes to blocks 0, 1, ….
        """
        block_size = self._paged_kv.layout.block_size
        room = min(self._paged_kv.num_blocks * block_size, self._model.config.context_length)
        num_tokens = min(num_tokens, room)
        blocks = list(range(blocks_for_tokens(num_tokens, block_size)))
        sequence = Sequence(SequenceId(0, 0), [0] * num_tokens, num_tokens, SamplingParams(max_tokens=1), blocks)
        self.run([Chunk(sequence, num_tokens, sample=True)])
        sequence.num_computed_tokens = num_tokens - 1
        self.run([Chunk(sequence, 1, sample=True)])

    def profile(self) -> Profile | None:
        """Where the model's time went; None where nothing is measured."""
        return self._model.profile()

    def _check(self, chunks: Seq[Chunk], spans: "_Spans") -> None:
        if max(spans.context_lens) > self._model.config.context_length:
            message = f"{max(spans.context_lens)} tokens do not fit the model's context length"
            raise PdserveError(ErrorReason.INVALID_ARGUMENT, message)
        if (spans.query_lens < 1).any():
            raise PdserveError(ErrorReason.INTERNAL, "a chunk without tokens")
        block_size = self._paged_kv.layout.block_size
        for chunk, end in zip(chunks, spans.ends, strict=True):
            sequence = chunk.sequence
            if end > len(sequence.token_ids) or (chunk.sample and end != len(sequence.token_ids)):
                raise PdserveError(ErrorReason.INTERNAL, f"sequence {sequence.id} has no such chunk (ends at {end})")
            if end > len(sequence.block_ids) * block_size:
                message = f"sequence {sequence.id} has too few blocks for {end} tokens"
                raise PdserveError(ErrorReason.INTERNAL, message)

    def _step_input(self, chunks: Seq[Chunk], spans: "_Spans") -> StepInput:
        token_ids = spans.token_ids(chunks)
        if not 0 <= token_ids.min() <= token_ids.max() < self._model.config.vocab_size:
            raise PdserveError(ErrorReason.INVALID_ARGUMENT, "a token id lies outside the model's vocabulary")
        tables = [chunk.sequence.block_table for chunk in chunks]
        for chunk, table in zip(chunks, tables, strict=True):
            table.follow(chunk.sequence.block_ids)
        return StepInput(
            token_ids.astype(np.int32),
            spans.positions(),
            spans.query_lens,
            spans.context_lens,
            tables,
            spans.last_rows([chunk.sample for chunk in chunks]),
        )

    def _score_prompt(self, chunk: Chunk, start: int) -> list[TokenLogprobs] | None:
        """Logprobs of the prompt tokens that follow the chunk's rows; None if a logit is no number."""
        sequence = chunk.sequence
        first = sequence.num_computed_tokens
        token_ids = sequence.token_ids[first + 1 : min(first + chunk.num_tokens + 1, sequence.num_prompt_tokens)]
        scored: list[TokenLogprobs] = []
        for done in range(0, len(token_ids), SCORED_ROWS):
            slab = token_ids[done : done + SCORED_ROWS]
            logits = self._model.logits(np.arange(start + done, start + done + len(slab), dtype=np.int32))
            if not np.isfinite(logits.max(axis=1)).all():
                return None
            scored += raw_logprobs(logits, slab, sequence.sampling.num_prompt_logprobs or 0)
        return scored


class _Spans:
    """Where a step's chunks begin and end: `starts` among the rows, `query_lens` and `context_lens` as in StepInput."""

    def __init__(self, chunks: Seq[Chunk]) -> None:
        self._firsts = [chunk.sequence.num_computed_tokens for chunk in chunks]
        lengths = [chunk.num_tokens for chunk in chunks]
        self.ends = [first + length for first, length in zip(self._firsts, lengths, strict=True)]
        self.query_lens: Int32s = np.array(lengths, dtype=np.int32)
        self.context_lens: Int32s = np.array(self.ends, dtype=np.int32)
        self.starts: Int32s = np.cumsum(self.query_lens, dtype=np.int32) - self.query_lens

    @property
    def _num_rows(self) -> int:
        return int(self.starts[-1] + self.query_lens[-1])

    def positions(self) -> Int32s:
        if self._num_rows == len(self._firsts):
            return self.context_lens - np.int32(1)
        offsets = np.repeat(np.array(self._firsts, dtype=np.int32) - self.starts, self.query_lens)
        return offsets + np.arange(self._num_rows, dtype=np.int32)

    def last_rows(self, chosen: list[bool]) -> Int32s:
        """Of the chosen chunks."""
        ends = self.starts + self.query_lens - np.int32(1)
        return ends if all(chosen) else ends[chosen]

    def token_ids(self, chunks: Seq[Chunk]) -> NDArray[np.int64]:
        if self._num_rows == len(chunks):
            return np.array([chunk.sequence.token_ids[end - 1] for chunk, end in self._with_ends(chunks)])
        return np.array([t for chunk, end in self._with_ends(chunks) for t in _last(chunk, end)])

    def _with_ends(self, chunks: Seq[Chunk]) -> Iterator[tuple[Chunk, int]]:
        return zip(chunks, self.ends, strict=True)


def _last(chunk: Chunk, end: int) -> list[int]:
    return chunk.sequence.token_ids[end - chunk.num_tokens : end]
