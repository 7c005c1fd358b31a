"""The seams of the engine: what a stage of the step loop, a model runner and a block store promise. No torch here."""

from collections.abc import Sequence as Seq
from typing import Protocol

from pdserve.core.model_info import KvLayout
from pdserve.engine.events import Event, StageSnapshot
from pdserve.engine.sequence import Chunk, ChunkResult


class Runner(Protocol):
    """Runs the model. Engine thread only."""

    def run(self, chunks: Seq[Chunk]) -> list[ChunkResult]:
        """Compute every chunk's KV in one ragged forward, sample where asked, and score prompts whose logprobs are.

        Mutates no sequence. Returns only when the KV is in the pages (device synchronised).
        """
        ...


class Stage(Protocol):
    """A scheduler taking part in the step: prefill, decode, or (colocated) both. Engine thread only."""

    @property
    def has_work(self) -> bool: ...

    def plan(self, now_s: float) -> list[Chunk]:
        """Choose this step's chunks and allocate their blocks."""
        ...

    def apply(self, chunks: Seq[Chunk], results: Seq[ChunkResult], now_s: float) -> None:
        """Account for what was run: advance, finish, free, and emit events."""
        ...

    def fail(self, chunks: Seq[Chunk], error: Exception) -> None:
        """The forward raised: end the chunks' sequences with an error and free what they hold."""
        ...

    def take_events(self) -> list[Event]:
        """What happened since the last call, in order."""
        ...

    def snapshot(self) -> StageSnapshot:
        """What it holds now."""
        ...


class BlockStore(Protocol):
    """Raw access to the bytes of KV blocks, for transports. Thread-safe as long as each block has one owner."""

    @property
    def layout(self) -> KvLayout: ...

    def read_block(self, block_id: int) -> memoryview:
        """The block's `layout.block_bytes` bytes, readable without a copy where the pool lies in host memory."""
        ...

    def write_block(self, block_id: int, offset: int, data: bytes | memoryview) -> None:
        """Put `data` at byte `offset` of the block."""
        ...
