"""Which rows of a ragged batch attend together, and over which tiles of positions; once a step, for all layers.

Tiles start at fixed positions, whatever the chunk. One that no row of a group can see is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve_kernels.interface import RaggedBatch

TILE_TOKENS = 256
GATHER_BYTES = 32 << 20
SCORE_BYTES = 8 << 20
WORKSPACE_BYTES = 2 * GATHER_BYTES + 3 * SCORE_BYTES


@dataclass(frozen=True, slots=True)
class Tile:
    """One stretch of positions, for `sequences` of a group, S of them.

    `page_rows` are row numbers of layer 0's K in the pool seen as [blocks · layers · 2 · kv_heads, …]. `hidden` tells
    which keys a query may not see, [S, 1, queries, tile]; `unwritten` which slots hold nothing, [S, 1, tile, 1]; each
    None where there are none.
    """

    sequences: slice
    page_rows: Tensor
    hidden: Tensor | None
    unwritten: Tensor | None


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences with equally many query rows, longest context first. `rows` [S, queries] index the batch's rows."""

    rows: Tensor
    tiles: list[Tile]


@dataclass(frozen=True, slots=True)
class _Part:
    """A group before its tiles: rows `first_rows[i]` and the `num_queries` − 1 after it end at `context_lens[i]` − 1.

    `members` number the sequences in the batch.
    """

    members: Sequence[int]
    first_rows: Sequence[int]
    context_lens: Sequence[int]
    num_queries: int


class TilePlanner:
    """Lays out one batch's tiles within the workspace, for layers of one `window`."""

    def __init__(self, batch: RaggedBatch, kv_pool: Tensor, window: int | None) -> None:
        self._batch = batch
        self._device = kv_pool.device
        self._window = window
        _, self._num_layers, _, self._num_kv_heads, self._block_size, self._head_dim = kv_pool.shape
        self._blocks_per_tile = max(1, TILE_TOKENS // self._block_size)
        self._tile = self._blocks_per_tile * self._block_size

    def groups(self, num_heads: int) -> list[Group]:
        starts = [0]
        for length in self._batch.query_lens:
            starts.append(starts[-1] + length)
        return [self._group(part) for part in (*self._singles(starts), *self._chunks(starts, num_heads))]

    def _singles(self, starts: Sequence[int]) -> list[_Part]:
        contexts = self._batch.context_lens
        singles = [i for i, length in enumerate(self._batch.query_lens) if length == 1]
        singles.sort(key=lambda i: -contexts[i])
        size = max(1, GATHER_BYTES // (self._num_kv_heads * self._tile * self._head_dim * 4))
        members = [singles[at : at + size] for at in range(0, len(singles), size)]
        return [_Part(part, [starts[i] for i in part], [contexts[i] for i in part], 1) for part in members]

    def _chunks(self, starts: Sequence[int], num_heads: int) -> list[_Part]:
        max_queries = max(1, SCORE_BYTES // (num_heads * self._tile * 4))
        parts: list[_Part] = []
        for i, length in enumerate(self._batch.query_lens):
            for at in range(0, length if length > 1 else 0, max_queries):
                num = min(max_queries, length - at)
                context = self._batch.context_lens[i] - length + at + num
                parts.append(_Part([i], [starts[i] + at], [context], num))
        return parts

    def _group(self, part: _Part) -> Group:
        first_rows = torch.tensor(part.first_rows, device=self._device)
        rows = first_rows.unsqueeze(1) + torch.arange(part.num_queries, device=self._device)
        first_seen = [self._first_seen(context - part.num_queries) for context in part.context_lens]
        tiles: list[Tile] = []
        for start in range(first_seen[-1] // self._tile * self._tile, part.context_lens[0], self._tile):
            first = sum(seen >= start + self._tile for seen in first_seen)
            end = sum(context > start for context in part.context_lens)
            if first < end:
                tiles.append(self._tile_at(start, part, slice(first, end)))
        return Group(rows, tiles)

    def _first_seen(self, position: int) -> int:
        """The first position that a row at `position` sees."""
        return 0 if self._window is None else max(0, position - self._window + 1)

    def _tile_at(self, start: int, part: _Part, sequences: slice) -> Tile:
        context_lens = part.context_lens[sequences]
        longest, shortest, end = context_lens[0], context_lens[-1], start + self._tile
        contexts = torch.tensor(context_lens, device=self._device).unsqueeze(1)
        keys = torch.arange(start, end, device=self._device)
        hidden = unwritten = None
        if end > shortest - part.num_queries or self._first_seen(longest - 1) > start:
            positions = contexts + torch.arange(-part.num_queries, 0, device=self._device)
            hidden = self._hidden(keys, positions.unsqueeze(2)).unsqueeze(1)
        if end > shortest:
            unwritten = (keys >= contexts).view(-1, 1, self._tile, 1)
        page_rows = self._page_rows(part.members[sequences], start // self._block_size)
        return Tile(sequences, page_rows, hidden, unwritten)

    def _hidden(self, keys: Tensor, positions: Tensor) -> Tensor:
        if self._window is None:
            return keys > positions
        return (keys > positions) | (keys <= positions - self._window)

    def _page_rows(self, members: Sequence[int], first_block: int) -> Tensor:
        """[S · kv_heads · blocks_per_tile]; past a table's end any page will do: it is masked."""
        tables: list[list[int]] = []
        for i in members:
            blocks = list(self._batch.block_tables[i][first_block : first_block + self._blocks_per_tile])
            tables.append(blocks + [0] * (self._blocks_per_tile - len(blocks)))
        pages = torch.tensor(tables, device=self._device) * (self._num_layers * 2 * self._num_kv_heads)
        heads = torch.arange(self._num_kv_heads, device=self._device)
        return (pages.unsqueeze(1) + heads.view(1, -1, 1)).flatten()
