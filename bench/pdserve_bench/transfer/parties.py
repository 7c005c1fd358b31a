"""Who sends what to whom: KV of SmolLM2-135M in bf16, in blocks of 16 tokens."""

from kv_transfer.messages import WorkerIdentity
from pdserve.core.ids import new_incarnation
from pdserve.core.model_info import KvLayout

LAYOUT = KvLayout("bfloat16", 16, num_layers=30, num_kv_heads=3, head_dim=64)
FINGERPRINT = "synthetic"


def sender(transport: str) -> WorkerIdentity:
    return WorkerIdentity(f"bench-prefill-{transport}", new_incarnation())


def receiver(incarnation: int) -> WorkerIdentity:
    return WorkerIdentity("bench-decode", incarnation)
