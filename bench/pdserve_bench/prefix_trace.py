"""A trace of real prompts through the workers' own prefix index, and through an ideal LRU. No model, no clock."""

import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pdserve.core.block_keys import PrefixGroup, PrefixScope
from pdserve.core.ids import SequenceId
from pdserve.core.model_info import KvLayout
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool, Owner, OwnerKind
from pdserve.engine.cached_prefix import CachedPrefix
from pdserve.engine.sequence import Sequence as TokenSequence

TRACE_BLOCK = 512
"""Tokens that one hash id of the trace stands for."""


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """One prompt, scaled so that a block of the trace is one KV block; `block_names` name each with all before it."""

    num_tokens: int
    block_names: tuple[int, ...]

    def num_full_blocks(self, block_size: int) -> int:
        return self.num_tokens // block_size

    def num_findable_blocks(self, block_size: int) -> int:
        """At least the last token is always computed."""
        return (self.num_tokens - 1) // block_size

    def token_ids(self, block_size: int) -> list[int]:
        """Every token of a block is the block's name: equal prefixes of names are equal prefixes of tokens."""
        return [self.block_names[position // block_size] for position in range(self.num_tokens)]


@dataclass(frozen=True, slots=True)
class HitRate:
    """In tokens, as workers count them."""

    queries: int
    hits: int

    @property
    def rate(self) -> float:
        return self.hits / max(1, self.queries)


@dataclass(frozen=True, slots=True)
class Replay:
    """One pool size. `num_blocks` KV blocks."""

    num_blocks: int
    index: HitRate
    ideal: HitRate

    @property
    def ratio(self) -> float:
        """1 where there is nothing to find."""
        return self.index.rate / self.ideal.rate if self.ideal.hits else 1.0

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "ratio": self.ratio}


def read_trace(path: Path, block_size: int) -> list[TracedPrompt]:
    """Lengths divided by 512 / `block_size`, rounded up, so that whole blocks stay whole and partial ones partial."""
    prompts: list[TracedPrompt] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        num_tokens = -(-int(row["input_length"]) * block_size // TRACE_BLOCK)
        prompts.append(TracedPrompt(num_tokens, tuple(row["hash_ids"])))
    return prompts


def replay_ideal(prompts: Iterable[TracedPrompt], num_blocks: int, block_size: int) -> HitRate:
    """An exact LRU of whole blocks, in which each prompt has ended before the next one comes.

    A prompt uses its first block last, so that no block outlives those before it.
    """
    kept: OrderedDict[int, None] = OrderedDict()
    queries = hits = 0
    for prompt in prompts:
        names = prompt.block_names[: prompt.num_findable_blocks(block_size)]
        num_found = next((at for at, name in enumerate(names) if name not in kept), len(names))
        queries += prompt.num_tokens
        hits += num_found * block_size
        for name in reversed(prompt.block_names[: prompt.num_full_blocks(block_size)]):
            kept[name] = None
            kept.move_to_end(name)
        while len(kept) > num_blocks:
            kept.popitem(last=False)
    return HitRate(queries, hits)


class IndexReplay:
    """The workers' own pool, index and keys, with at most `max_in_flight` prompts in it at a time.

    A prompt's blocks are there for others when it ends, which is when another must begin.
    """

    def __init__(self, num_blocks: int, block_size: int, max_in_flight: int) -> None:
        layout = KvLayout("bfloat16", block_size, num_layers=1, num_kv_heads=1, head_dim=1)
        self._scope = PrefixScope("trace", layout, "none")
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._max_in_flight = max_in_flight
        self._in_flight: deque[tuple[TokenSequence, Owner, CachedPrefix]] = deque()

    def run(self, prompts: Iterable[TracedPrompt]) -> HitRate:
        """Raises: RuntimeError: the pool's books are wrong, or a prompt is larger than the pool."""
        queries = hits = 0
        for number, prompt in enumerate(prompts):
            queries += prompt.num_tokens
            hits += self._begin(number, prompt)
        while self._in_flight:
            self._end_oldest()
        self._pool.check_integrity()
        return HitRate(queries, hits)

    def _begin(self, number: int, prompt: TracedPrompt) -> int:
        """The number of tokens found."""
        num_blocks = blocks_for_tokens(prompt.num_tokens, self._block_size)
        while self._in_flight and not self._has_room(num_blocks):
            self._end_oldest()
        token_ids, sampling = prompt.token_ids(self._block_size), SamplingParams(max_tokens=1)
        sequence = TokenSequence(SequenceId(1, number), token_ids, len(token_ids), sampling)
        owner = Owner(OwnerKind.SEQUENCE, sequence.id)
        prefix = CachedPrefix(self._pool, self._scope.key_chain(PrefixGroup()))
        num_found = prefix.acquire(sequence, owner)
        sequence.block_ids += self._pool.allocate(num_blocks - len(sequence.block_ids), owner)
        self._in_flight.append((sequence, owner, prefix))
        return num_found

    def _has_room(self, num_blocks: int) -> bool:
        return len(self._in_flight) < self._max_in_flight and self._pool.can_allocate(num_blocks)

    def _end_oldest(self) -> None:
        sequence, owner, prefix = self._in_flight.popleft()
        sequence.num_computed_tokens = sequence.num_tokens
        prefix.publish(sequence, owner)
        self._pool.free(sequence.block_ids, owner)


def replay(prompts: Sequence[TracedPrompt], num_blocks: int, block_size: int, max_in_flight: int) -> Replay:
    index = IndexReplay(num_blocks, block_size, max_in_flight).run(prompts)
    return Replay(num_blocks, index, replay_ideal(prompts, num_blocks, block_size))
