"""A model without weights: the next token is a function of all the tokens so far, so every stream can be foretold."""

import os
import struct
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq

from pdserve.core.ids import SequenceId
from pdserve.core.model_info import KvLayout
from pdserve.core.sampling import SamplingParams, TokenLogprobs
from pdserve.engine.sequence import Chunk, ChunkResult, Sampled, Sequence
from pdserve_kernels.host_memory import shared_empty

VOCAB_SIZE = 97


def next_token(token_ids: Seq[int]) -> int:
    """Never 0, so that tests can use 0 as EOS."""
    return 1 + (sum((i + 1) * t for i, t in enumerate(token_ids)) * 31 + len(token_ids)) % (VOCAB_SIZE - 1)


def expected_output(prompt: Seq[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


def fake_prompt_logprobs(sequence: Sequence, begin: int, end: int) -> tuple[TokenLogprobs, ...]:
    """Of the prompt tokens behind positions `begin` to `end` − 1: each tells its own position."""
    num_top = sequence.sampling.num_prompt_logprobs
    if num_top is None:
        return ()
    top = tuple((VOCAB_SIZE - 1, -2.0) for _ in range(num_top))
    return tuple(TokenLogprobs(-float(p), top) for p in range(begin + 1, min(end + 1, sequence.num_prompt_tokens)))


class FakeStore:
    """A block store whose "KV" of a token is its id, so that KV which was lost or mixed up changes what is sampled.

    Others may read it, as a prefill worker's."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.layout = KvLayout("float32", block_size, num_layers=1, num_kv_heads=1, head_dim=1)
        self.num_blocks = num_blocks
        area, self.shared_fd = shared_empty(num_blocks * self.layout.block_bytes)
        weakref.finalize(self, os.close, self.shared_fd)
        self._blocks = [row.numpy().data for row in area.fill_(255).view(num_blocks, -1)]

    def read_block(self, block_id: int) -> memoryview:
        return memoryview(self._blocks[block_id])

    def write_block(self, block_id: int, offset: int, data: bytes | memoryview) -> None:
        self._blocks[block_id][offset : offset + len(data)] = data

    def put(self, block_id: int, slot: int, token_id: int) -> None:
        struct.pack_into("<i", self._blocks[block_id], 4 * slot, token_id)

    def get(self, block_id: int, slot: int) -> int:
        return int(struct.unpack_from("<i", self._blocks[block_id], 4 * slot)[0])


class FakeRunner:
    """Implements pdserve.engine.interfaces.Runner. `before_run` may raise, block, or look at the chunks."""

    def __init__(
        self,
        block_size: int,
        before_run: Callable[[Seq[Chunk]], None] = lambda _: None,
        store: FakeStore | None = None,
    ) -> None:
        self.block_size = block_size
        self.before_run = before_run
        self.store = store
        self.num_steps = 0
        self.num_tokens = 0

    def run(self, chunks: Seq[Chunk]) -> list[ChunkResult]:
        self.before_run(chunks)
        self.num_steps += 1
        return [self._run_one(chunk) for chunk in chunks]

    def _run_one(self, chunk: Chunk) -> ChunkResult:
        sequence = chunk.sequence
        begin, end = sequence.num_computed_tokens, sequence.num_computed_tokens + chunk.num_tokens
        assert chunk.num_tokens > 0
        assert end <= sequence.num_tokens
        assert end <= len(sequence.block_ids) * self.block_size, "computed beyond the allocated blocks"
        self.num_tokens += chunk.num_tokens
        attended = self._attend(sequence, begin, end)
        scored = fake_prompt_logprobs(sequence, begin, end)
        if not chunk.sample:
            return ChunkResult(None, scored)
        assert end == sequence.num_tokens
        return ChunkResult(Sampled(next_token(attended)), scored)

    def _attend(self, sequence: Sequence, begin: int, end: int) -> list[int]:
        if self.store is None:
            return sequence.token_ids[:end]
        for position in range(begin, end):
            block_id, slot = sequence.block_ids[position // self.block_size], position % self.block_size
            self.store.put(block_id, slot, sequence.token_ids[position])
        places = [divmod(position, self.block_size) for position in range(end)]
        return [self.store.get(sequence.block_ids[block], slot) for block, slot in places]


def make_sequence(number: int, num_prompt_tokens: int, **sampling: object) -> Sequence:
    prompt = [1 + (number * 7 + i) % (VOCAB_SIZE - 1) for i in range(num_prompt_tokens)]
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return Sequence(SequenceId(1, number), prompt, num_prompt_tokens, params)
