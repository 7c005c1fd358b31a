"""Runs chunks on the model: one ragged forward a step, then sampling. Schedules nothing and owns no block."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import SamplingParams, TokenLogprobs
from pdserve.engine.model.interface import ForwardInput, Model
from pdserve.engine.paged_kv import PagedKv
from pdserve.engine.sampler import raw_logprobs, sample
from pdserve.engine.sequence import Chunk, ChunkResult, Sampled, Sequence
from pdserve_kernels.interface import Kernels, RaggedBatch

_WARM_UP_TOKENS = 64
SCORED_ROWS = 32
"""Rows of prompt logits held at a time: with a vocabulary of 262,144, 32 MiB, and twice that to score them."""


class ModelRunner:
    """See `interfaces.Runner`. Rows are padded with token 0 up to what the kernels need for equal bits."""

    def __init__(self, model: Model, kernels: Kernels, paged_kv: PagedKv) -> None:
        self._model = model
        self._kernels = kernels
        self._paged_kv = paged_kv
        self._eos_token_ids = frozenset(model.config.eos_token_ids)

    def run(self, chunks: Seq[Chunk]) -> list[ChunkResult]:
        if not chunks:
            return []
        for chunk in chunks:
            self._check(chunk)
        hidden = self._forward(chunks)
        scores = [
            self._score_prompt(chunk, start, hidden) for chunk, start in zip(chunks, _starts(chunks), strict=True)
        ]
        rows = iter(self._sampled_logits(chunks, hidden))
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return [self._result(chunk, scored, rows) for chunk, scored in zip(chunks, scores, strict=True)]

    def warm_up(self) -> None:
        """Run one prompt and one decode row, so that the first request does not pay for first calls.

        Call before any block is handed out: it writes to blocks 0, 1, ….
        """
        block_size = self._paged_kv.layout.block_size
        room = min(self._paged_kv.num_blocks * block_size, self._model.config.context_length)
        num_tokens = min(_WARM_UP_TOKENS, room)
        blocks = list(range(blocks_for_tokens(num_tokens, block_size)))
        sequence = Sequence(SequenceId(0, 0), [0] * num_tokens, num_tokens, SamplingParams(max_tokens=1), blocks)
        self.run([Chunk(sequence, num_tokens, sample=True)])
        sequence.num_computed_tokens = num_tokens - 1
        self.run([Chunk(sequence, 1, sample=True)])

    def _check(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        end = sequence.num_computed_tokens + chunk.num_tokens
        if chunk.num_tokens < 1 or end > sequence.num_tokens or (chunk.sample and end != sequence.num_tokens):
            raise PdserveError(ErrorReason.INTERNAL, f"sequence {sequence.id} has no such chunk (ends at {end})")
        if end > len(sequence.block_ids) * self._paged_kv.layout.block_size:
            raise PdserveError(ErrorReason.INTERNAL, f"sequence {sequence.id} has too few blocks for {end} tokens")
        if end > self._model.config.context_length:
            raise PdserveError(ErrorReason.INVALID_ARGUMENT, f"{end} tokens do not fit the model's context length")
        wrong = not all(0 <= t < self._model.config.vocab_size for t in _chunk_ids(chunk))
        if wrong:
            raise PdserveError(ErrorReason.INVALID_ARGUMENT, "a token id lies outside the model's vocabulary")

    def _forward(self, chunks: Seq[Chunk]) -> Tensor:
        """Write the chunks' KV; hidden states of all rows, padding included."""
        token_ids = [token_id for chunk in chunks for token_id in _chunk_ids(chunk)]
        batch = self._batch(chunks, len(token_ids))
        padding = [0] * (batch.num_rows - len(token_ids))
        positions = [p for chunk in chunks for p in range(*_chunk_span(chunk))]
        rows = ForwardInput(
            token_ids=self._tensor(token_ids + padding),
            positions=self._tensor(positions + padding),
            step=self._kernels.begin(batch, self._paged_kv.pool),
        )
        return self._model.forward(rows)

    def _sampled_logits(self, chunks: Seq[Chunk], hidden: Tensor) -> np.ndarray:
        """Of the chunks that sample, in their order."""
        ends = [start + chunk.num_tokens for chunk, start in zip(chunks, _starts(chunks), strict=True) if chunk.sample]
        return self._logits(hidden, [end - 1 for end in ends])

    def _logits(self, hidden: Tensor, rows: list[int]) -> np.ndarray:
        """fp32 [len(rows), vocab_size] on the host."""
        padding = [0] * (self._padded(len(rows)) - len(rows))
        logits: np.ndarray = self._model.logits(hidden[self._tensor(rows + padding)])[: len(rows)].cpu().numpy()
        return logits

    def _score_prompt(self, chunk: Chunk, start: int, hidden: Tensor) -> list[TokenLogprobs] | None:
        """Logprobs, if asked for, of the prompt tokens that follow the chunk's rows; None if a logit is no number."""
        num_top = chunk.sequence.sampling.num_prompt_logprobs
        first, end = _chunk_span(chunk)
        token_ids = chunk.sequence.token_ids[first + 1 : min(end + 1, chunk.sequence.num_prompt_tokens)]
        scored: list[TokenLogprobs] = []
        if num_top is None:
            return scored
        for done in range(0, len(token_ids), SCORED_ROWS):
            slab = token_ids[done : done + SCORED_ROWS]
            logits = self._logits(hidden, list(range(start + done, start + done + len(slab))))
            if not np.isfinite(logits.max(axis=1)).all():
                return None
            scored += raw_logprobs(logits, slab, num_top)
        return scored

    def _batch(self, chunks: Seq[Chunk], num_tokens: int) -> RaggedBatch:
        return RaggedBatch(
            query_lens=tuple(chunk.num_tokens for chunk in chunks),
            context_lens=tuple(_chunk_span(chunk)[1] for chunk in chunks),
            block_tables=tuple(tuple(chunk.sequence.block_ids) for chunk in chunks),
            num_rows=self._padded(num_tokens),
        )

    def _result(self, chunk: Chunk, scored: list[TokenLogprobs] | None, rows: Iterator[np.ndarray]) -> ChunkResult:
        sampled = self._sample(chunk.sequence, next(rows)) if chunk.sample else None
        return ChunkResult(Sampled(None)) if scored is None else ChunkResult(sampled, tuple(scored))

    def _sample(self, sequence: Sequence, logits: np.ndarray) -> Sampled:
        return sample(logits, sequence.sampling, sequence.token_ids, sequence.num_prompt_tokens, self._eos_token_ids)

    def _padded(self, num_rows: int) -> int:
        return -(-num_rows // self._kernels.row_multiple) * self._kernels.row_multiple

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._model.device)


def _chunk_span(chunk: Chunk) -> tuple[int, int]:
    """First position, and the one after the last."""
    start = chunk.sequence.num_computed_tokens
    return start, start + chunk.num_tokens


def _chunk_ids(chunk: Chunk) -> list[int]:
    return chunk.sequence.token_ids[slice(*_chunk_span(chunk))]


def _starts(chunks: Seq[Chunk]) -> list[int]:
    """The row of each chunk's first token."""
    return list(accumulate((chunk.num_tokens for chunk in chunks[:-1]), initial=0))
