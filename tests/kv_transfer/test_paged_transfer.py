"""The transport over real pools of KV blocks."""

import pytest
import torch

from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import NetworkKvSender
from pdserve.core.model_info import KvLayout
from pdserve.engine.paged_kv import PagedKv
from pdserve.serving.settings import TransferSettings
from tests.kv_transfer.support import FINGERPRINT, RECEIVER, SENDER, CheckingHost, EndLog, peer_at, plan_of


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("chunk_bytes", [1000, 1024 * 1024])
@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_every_bit_pattern_survives(dtype: str, chunk_bytes: int, transport: str):
    """K02: the bytes on the wire are the pool's, NaN payloads included, and no more of them."""
    layout = KvLayout(dtype=dtype, block_size=16, num_layers=3, num_kv_heads=2, head_dim=8)
    source, target = (PagedKv(layout, 12, torch.device("cpu"), shared=shared) for shared in (transport == "shm", False))
    bits = source.pool.view(torch.uint8)
    bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))
    assert source.pool.isnan().any()
    host, ends, settings = CheckingHost(12), EndLog(), TransferSettings(chunk_bytes=chunk_bytes)
    receiver = KvReceiver(RECEIVER, FINGERPRINT, target, host, settings, with_shm=True)
    address = f"127.0.0.1:{receiver.start('127.0.0.1', 0)}"
    sender = NetworkKvSender(source, SENDER, FINGERPRINT, settings, shared_fd=source.shared_fd)
    transfer = sender.open(plan_of(1, peer_at(address, layout, transport=transport), 5), ends)
    transfer.send([11, 0, 7])
    transfer.send([3, 4])
    transfer.commit([1])
    end = ends.wait(1)
    sender.close()
    receiver.close()
    assert end.error is None
    assert receiver.stats.num_failed == 0
    assert end.num_bytes == source.pool[:5].numel() * source.pool.element_size()
    received = list(host.committed[1].block_ids)
    assert torch.equal(target.pool[received].view(torch.uint8), source.pool[[11, 0, 7, 3, 4]].view(torch.uint8))
