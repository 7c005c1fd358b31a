"""Raw access to KV blocks: no copy on the host, nothing written past a block."""

import pytest
import torch

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_info import KvLayout
from pdserve.engine.paged_kv import PagedKv

CPU = torch.device("cpu")


@pytest.fixture(params=["float32", "bfloat16"])
def store(request):
    return PagedKv(KvLayout(request.param, block_size=4, num_layers=2, num_kv_heads=3, head_dim=8), 5, CPU)


def test_a_block_is_one_run_of_layout_bytes(store):
    assert store.num_blocks == 5
    assert store.pool.shape == (5, 2, 2, 3, 4, 8)
    assert store.pool[0].nbytes == store.layout.block_bytes == len(store.read_block(0))


def test_reading_copies_nothing(store):
    view = store.read_block(3)
    store.pool[3, 1, 0, 2, 3, 7] = 1.5
    assert bytes(view) == store.pool[3].contiguous().view(torch.uint8).numpy().tobytes()
    assert any(view)


def test_a_block_travels_in_pieces(store):
    store.pool[1].normal_()
    data, half = store.read_block(1), store.layout.block_bytes // 2
    store.write_block(4, 0, bytes(data[:half]))
    store.write_block(4, half, data[half:])
    assert torch.equal(store.pool[4], store.pool[1])
    assert store.pool[[0, 2, 3]].count_nonzero() == 0


@pytest.mark.parametrize(("block_id", "offset", "excess"), [(5, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1)])
def test_what_does_not_fit_is_refused_and_not_written(store, block_id, offset, excess):
    with pytest.raises(PdserveError) as caught:
        store.write_block(block_id, offset, b"\x01" * (store.layout.block_bytes + excess))
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    assert store.pool.count_nonzero() == 0
    with pytest.raises(PdserveError):
        store.read_block(5)


@pytest.mark.parametrize(
    "layout", [KvLayout("int8", 4, 1, 1, 8), KvLayout("float32", 4, 1, 1, 8, inner_order="dim_slot")]
)
def test_unknown_layouts_are_refused(layout):
    with pytest.raises(PdserveError) as caught:
        PagedKv(layout, 2, CPU)
    assert caught.value.reason is ErrorReason.UNSUPPORTED


def test_an_empty_pool_is_refused():
    with pytest.raises(PdserveError):
        PagedKv(KvLayout("float32", 4, 1, 1, 8), 0, CPU)
