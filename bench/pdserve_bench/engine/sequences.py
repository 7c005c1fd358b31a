"""Sequences in a pool as it looks after hours of use: random token ids, blocks in random order, KV really computed.

KV is computed once, for one sequence of the longest context. Every sequence of a decode batch gets blocks of its own
with a copy of it, so that a large batch reads as much memory as in life and is set up in a second.
"""

import random
from itertools import count

from pdserve.core.ids import SequenceId
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import SamplingParams
from pdserve.engine.loading import LoadedEngine
from pdserve.engine.sequence import Chunk, Sequence
from pdserve_bench.engine.plan import Workload

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)
FILL_CHUNK = 512
"""Prompt tokens in a step, where nothing is measured."""


def num_blocks_needed(workload: Workload) -> int:
    """The source's, and those of the largest batch at the longest context or of one prompt; those of warm-up are free
    again."""
    longest = blocks_for_tokens(workload.longest, workload.block_size)
    return longest * (1 + max((1, *workload.batches)))


class SequenceMaker:
    """Makes sequences for `engine`; those of one call own disjoint blocks, those of different calls may share them."""

    def __init__(self, engine: LoadedEngine, workload: Workload) -> None:
        self._engine = engine
        self._random = random.Random(workload.seed)
        self._numbers = count()
        self._block_ids = list(range(engine.paged_kv.num_blocks))
        self._random.shuffle(self._block_ids)
        self._source = self._computed_source(max((1, *workload.contexts)) + workload.num_steps)

    def prompt(self, num_tokens: int) -> Sequence:
        """Nothing of it is computed."""
        return self._sequence(num_tokens, self._take(1, num_tokens)[0])

    def decode_batch(self, batch: int, context: int, num_steps: int) -> list[Sequence]:
        """Each one's next row sees `context` tokens; there are blocks for `num_steps` rows."""
        tables = self._take(batch, context - 1 + num_steps)
        return [self._copy_of_source(context, block_ids) for block_ids in tables]

    def _copy_of_source(self, context: int, block_ids: list[int]) -> Sequence:
        copied = blocks_for_tokens(context, self._block_size)
        pool = self._engine.paged_kv.pool
        pool[block_ids[:copied]] = pool[self._source.block_ids[:copied]]
        sequence = self._sequence(context, block_ids)
        sequence.token_ids[: context - 1] = self._source.token_ids[: context - 1]
        sequence.num_computed_tokens = context - 1
        return sequence

    def _computed_source(self, num_tokens: int) -> Sequence:
        num_blocks = blocks_for_tokens(num_tokens, self._block_size)
        source = self._sequence(num_tokens, self._block_ids[:num_blocks])
        self._block_ids = self._block_ids[num_blocks:]
        run_prompt(self._engine, source, FILL_CHUNK)
        return source

    def _take(self, num_sequences: int, num_tokens: int) -> list[list[int]]:
        each = blocks_for_tokens(num_tokens, self._block_size)
        return [self._block_ids[index * each : (index + 1) * each] for index in range(num_sequences)]

    def _sequence(self, num_tokens: int, block_ids: list[int]) -> Sequence:
        vocab_size = self._engine.model_info.vocab_size
        token_ids = [self._random.randrange(vocab_size) for _ in range(num_tokens)]
        return Sequence(SequenceId(1, next(self._numbers)), token_ids, num_tokens, GREEDY, block_ids)

    @property
    def _block_size(self) -> int:
        return self._engine.paged_kv.layout.block_size


def run_prompt(engine: LoadedEngine, sequence: Sequence, chunk: int) -> None:
    """All of the sequence in chunks, the last of which samples; what is sampled is left out."""
    while sequence.num_remaining_tokens:
        num_tokens = min(chunk, sequence.num_remaining_tokens)
        engine.runner.run([Chunk(sequence, num_tokens, sample=num_tokens == sequence.num_remaining_tokens)])
        sequence.num_computed_tokens += num_tokens


def run_step(engine: LoadedEngine, sequences: list[Sequence]) -> None:
    """One decode step, and every sequence a token longer."""
    results = engine.runner.run([Chunk(sequence, 1, sample=True) for sequence in sequences])
    for sequence, result in zip(sequences, results, strict=True):
        if result.sampled is None or result.sampled.token_id is None:
            raise RuntimeError("a decode row gave no token: its logits are no numbers")
        sequence.token_ids.append(result.sampled.token_id)
        sequence.num_computed_tokens += 1
