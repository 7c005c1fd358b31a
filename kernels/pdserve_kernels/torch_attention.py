"""Paged attention of a ragged batch in plain torch: gathered tiles of pages, fp32, merged in order of position.

The running-maximum merge is that of FlashAttention (Dao et al., 2022). Query heads that share a KV head are folded
into the query-length axis. A tile that a row cannot see leaves its bits alone, so a row's result does not depend on
the rows it shares a tile with.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve_kernels.interface import RaggedBatch
from pdserve_kernels.tile_plan import Group, Tile, TilePlanner


class TorchPagedStep:
    """See `interface.PagedStep`."""

    def __init__(self, batch: RaggedBatch, kv_pool: Tensor, row_multiple: int) -> None:
        self._batch = batch
        self._pool = kv_pool
        self._num_query_rows = batch.num_query_rows
        self._row_multiple = row_multiple
        _, _, _, self._num_kv_heads, self._block_size, self._head_dim = kv_pool.shape
        self._blocks, self._slots = self._write_targets(batch)
        self._longest = max(batch.context_lens, default=0)
        self._groups: dict[int | None, list[Group]] = {}

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        for which, rows in enumerate((key, value)):
            pages = self._pool[:, layer, which]
            pages[self._blocks, :, self._slots] = rows[: self._num_query_rows].to(pages.dtype)

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        if window is not None and window >= self._longest:
            window = None
        if window not in self._groups:
            self._groups[window] = TilePlanner(self._batch, self._pool, window).groups(query.shape[1])
        out = torch.zeros_like(query)
        for group in self._groups[window]:
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

    def _attend_group(self, group: Group, layer: int, query: Tensor) -> Tensor:
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

    def _merge_tiles(self, tiles: Sequence[Tile], layer: int, query: Tensor, shared: int) -> Tensor:
        """Online softmax of query [S, kv_heads, M, D] over the tiles."""
        total = torch.zeros_like(query)
        # Finite, or a first tile that a row cannot see would give it −inf − −inf.
        highest = query.new_full((*query.shape[:3], 1), torch.finfo(query.dtype).min)
        weight_sum = torch.zeros_like(highest)
        for tile in tiles:
            active = tile.sequences
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

    def _gather(self, tile: Tile, layer: int) -> tuple[Tensor, Tensor]:
        """The tile's K and V, fp32 [S, kv_heads, tile, D]; unwritten slots of V are zero, since 0 · NaN is NaN."""
        pages = self._pool.view(-1, self._block_size * self._head_dim)
        first = 2 * self._num_kv_heads * layer
        num_sequences = tile.sequences.stop - tile.sequences.start
        shape = (num_sequences, self._num_kv_heads, -1, self._head_dim)
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
