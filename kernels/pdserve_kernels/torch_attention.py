"""Paged attention of a ragged batch in plain torch: gathered tiles of pages, fp32, merged in order of position.

The running-maximum merge is that of FlashAttention (Dao et al., 2022). Query heads that share a KV head are folded
into the query-length axis. Tiles start at fixed positions, so a row's result does not depend on its chunk.
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
class _Tile:
    """One stretch of positions, for the first `num_sequences` sequences of a group.

    `page_rows` are row numbers of layer 0's K in the pool seen as [blocks · layers · 2 · kv_heads, …]. `hidden` tells
    which keys a query may not see, [S, 1, queries, tile]; `unwritten` which slots hold nothing, [S, 1, tile, 1]; each
    None where there are none.
    """

    num_sequences: int
    page_rows: Tensor
    hidden: Tensor | None
    unwritten: Tensor | None


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with equally many query rows, longest context first. `rows` [S, queries] index the batch's rows."""

    rows: Tensor
    tiles: list[_Tile]


class TorchPagedStep:
    """See `interface.PagedStep`."""

    def __init__(self, batch: RaggedBatch, kv_pool: Tensor, row_multiple: int) -> None:
        self._pool = kv_pool
        self._num_query_rows = batch.num_query_rows
        self._row_multiple = row_multiple
        _, _, _, self._num_kv_heads, self._block_size, self._head_dim = kv_pool.shape
        self._blocks, self._slots = self._write_targets(batch)
        self._planner = _Planner(batch, kv_pool)
        self._groups: list[_Group] | None = None

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        for which, rows in enumerate((key, value)):
            pages = self._pool[:, layer, which]
            pages[self._blocks, :, self._slots] = rows[: self._num_query_rows].to(pages.dtype)

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        if window is not None:
            raise NotImplementedError("sliding window")
        if self._groups is None:
            self._groups = self._planner.groups(query.shape[1])
        out = torch.zeros_like(query)
        for group in self._groups:
            out[group.rows] = self._attend_group(group, layer, query[group.rows] * scale)
        return out.flatten(1)

    def _write_targets(self, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        blocks: list[int] = []
        slots: list[int] = []
        for length, context, table in zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True):
            for position in range(context - length, context):
                blocks.append(table[position // self._block_size])
                slots.append(position % self._block_size)
        device = self._pool.device
        return torch.tensor(blocks, device=device), torch.tensor(slots, device=device)

    def _attend_group(self, group: _Group, layer: int, query: Tensor) -> Tensor:
        """[S, queries, heads, D] → the same shape."""
        num_sequences, num_queries, num_heads, dim = query.shape
        shared = num_heads // self._num_kv_heads
        num_folded = num_queries * shared
        padded = -(-num_folded // self._row_multiple) * self._row_multiple
        folded = query.new_zeros(num_sequences, self._num_kv_heads, padded, dim)
        by_head = query.view(num_sequences, num_queries, self._num_kv_heads, shared, dim).permute(0, 2, 1, 3, 4)
        folded[:, :, :num_folded] = by_head.reshape(num_sequences, self._num_kv_heads, num_folded, dim)
        result = self._merge_tiles(group.tiles, layer, folded, shared)[:, :, :num_folded]
        by_query = result.view(num_sequences, self._num_kv_heads, num_queries, shared, dim).permute(0, 2, 1, 3, 4)
        return by_query.reshape(num_sequences, num_queries, num_heads, dim)

    def _merge_tiles(self, tiles: Sequence[_Tile], layer: int, query: Tensor, shared: int) -> Tensor:
        """Online softmax of query [S, kv_heads, M, D] over the tiles."""
        total = torch.zeros_like(query)
        highest = query.new_full((*query.shape[:3], 1), float("-inf"))
        weight_sum = torch.zeros_like(highest)
        for tile in tiles:
            active = slice(0, tile.num_sequences)
            key, value = self._gather(tile, layer)
            scores = torch.matmul(query[active], key.transpose(2, 3))
            if tile.hidden is not None:
                _hide(scores, tile.hidden, shared)
            new_highest = torch.maximum(highest[active], scores.amax(dim=-1, keepdim=True))
            weights = scores.sub_(new_highest).exp_()
            rescale = (highest[active] - new_highest).exp_()
            highest[active] = new_highest
            weight_sum[active] = weight_sum[active] * rescale + weights.sum(dim=-1, keepdim=True)
            total[active] = total[active] * rescale + torch.matmul(weights, value)
        return total / weight_sum

    def _gather(self, tile: _Tile, layer: int) -> tuple[Tensor, Tensor]:
        """The tile's K and V, fp32 [S, kv_heads, tile, D]; unwritten slots of V are zero, since 0 · NaN is NaN."""
        pages = self._pool.view(-1, self._block_size * self._head_dim)
        first = 2 * self._num_kv_heads * layer
        shape = (tile.num_sequences, self._num_kv_heads, -1, self._head_dim)
        key = pages.index_select(0, tile.page_rows + first).view(shape).float()
        value = pages.index_select(0, tile.page_rows + (first + self._num_kv_heads)).view(shape).float()
        if tile.unwritten is not None:
            value.masked_fill_(tile.unwritten, 0.0)
        return key, value


def _hide(scores: Tensor, hidden: Tensor, shared: int) -> None:
    """Scores [S, kv_heads, M, tile] of keys in `hidden` [S, 1, queries, tile] become −inf, but for padding rows'."""
    num_sequences, _, num_queries, tile = hidden.shape
    num_heads = scores.shape[1]
    per_query = scores[:, :, : num_queries * shared].view(num_sequences, num_heads, num_queries, shared, tile)
    per_query.masked_fill_(hidden.view(num_sequences, 1, num_queries, 1, tile), float("-inf"))


class _Planner:
    """Groups a batch's rows and lays out their tiles, within the workspace; once a step, for all layers."""

    def __init__(self, batch: RaggedBatch, kv_pool: Tensor) -> None:
        self._batch = batch
        self._device = kv_pool.device
        _, self._num_layers, _, self._num_kv_heads, self._block_size, self._head_dim = kv_pool.shape
        self._blocks_per_tile = max(1, TILE_TOKENS // self._block_size)
        self._tile = self._blocks_per_tile * self._block_size

    def groups(self, num_heads: int) -> list[_Group]:
        starts = [0]
        for length in self._batch.query_lens:
            starts.append(starts[-1] + length)
        singles = [i for i, length in enumerate(self._batch.query_lens) if length == 1]
        singles.sort(key=lambda i: -self._batch.context_lens[i])
        size = max(1, GATHER_BYTES // (self._num_kv_heads * self._tile * self._head_dim * 4))
        groups = [
            self._group(part, [[starts[i]] for i in part], [self._batch.context_lens[i] for i in part])
            for part in (singles[at : at + size] for at in range(0, len(singles), size))
        ]
        max_queries = max(1, SCORE_BYTES // (num_heads * self._tile * 4))
        for i, length in enumerate(self._batch.query_lens):
            for at in range(0, length if length > 1 else 0, max_queries):
                num = min(max_queries, length - at)
                context = self._batch.context_lens[i] - length + at + num
                groups.append(self._group([i], [list(range(starts[i] + at, starts[i] + at + num))], [context]))
        return groups

    def _group(self, members: Sequence[int], rows: list[list[int]], context_lens: list[int]) -> _Group:
        """`context_lens` end with each member's last row of this group."""
        num_queries = len(rows[0])
        contexts = torch.tensor(context_lens, device=self._device)
        positions = contexts.unsqueeze(1) + torch.arange(-num_queries, 0, device=self._device)
        tiles: list[_Tile] = []
        for start in range(0, context_lens[0], self._tile):
            num = sum(context > start for context in context_lens)
            keys = torch.arange(start, start + self._tile, device=self._device)
            hidden = (
                keys > positions[:num].unsqueeze(2)
                if start + self._tile > context_lens[num - 1] - num_queries
                else None
            )
            unwritten = keys >= contexts[:num].unsqueeze(1) if start + self._tile > context_lens[num - 1] else None
            tiles.append(
                _Tile(
                    num,
                    self._page_rows(members[:num], start // self._block_size),
                    None if hidden is None else hidden.unsqueeze(1),
                    None if unwritten is None else unwritten.view(num, 1, self._tile, 1),
                )
            )
        return _Group(torch.tensor(rows, device=self._device), tiles)

    def _page_rows(self, members: Sequence[int], first_block: int) -> Tensor:
        """[S · kv_heads · blocks_per_tile]; past a table's end any page will do: it is masked."""
        tables: list[list[int]] = []
        for i in members:
            blocks = list(self._batch.block_tables[i][first_block : first_block + self._blocks_per_tile])
            tables.append(blocks + [0] * (self._blocks_per_tile - len(blocks)))
        pages = torch.tensor(tables, device=self._device) * (self._num_layers * 2 * self._num_kv_heads)
        heads = torch.arange(self._num_kv_heads, device=self._device)
        return (pages.unsqueeze(1) + heads.view(1, -1, 1)).flatten()
