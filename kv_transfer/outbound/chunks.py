"""Cuts a batch of blocks into chunks, for every transport."""

from collections.abc import Iterator

from kv_transfer.chunk_frame import ChunkHeader, chunk_spans
from kv_transfer.outbound.link import ChunkBatch
from pdserve.engine.interfaces import BlockStore

Chunk = tuple[ChunkHeader, list[memoryview]]


def chunks_of(store: BlockStore, batch: ChunkBatch, epoch: int, chunk_bytes: int) -> Iterator[Chunk]:
    """(header, pages) of at most `chunk_bytes` each, read from the store as they are asked for; for a batch without
    blocks, one without pages, which renews the lease."""
    transfer_id, first, sequence = batch.transfer_id, batch.first_block, batch.first_sequence
    if not batch.block_ids:
        yield ChunkHeader(transfer_id, epoch, sequence, first, 0, 0), []
    for span in chunk_spans(first, len(batch.block_ids), store.layout.block_bytes, chunk_bytes):
        index, offset = span.first_block - first, span.byte_offset
        pages = [store.read_block(block_id) for block_id in batch.block_ids[index : index + span.num_blocks]]
        if span.num_blocks == 1:
            pages = [pages[0][offset : offset + span.num_bytes]]
        yield ChunkHeader(transfer_id, epoch, sequence, span.first_block, offset, span.num_blocks), pages
        sequence += 1
