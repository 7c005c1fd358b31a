"""Worker values for tests of policies."""

from coordinator.fleet.values import Capacity, Role, WorkerInfo, WorkerKey
from coordinator.scheduling.routing import WorkerView
from pdserve.client.wire import PROTOCOL_VERSION
from pdserve.core.model_info import KvLayout, ModelInfo

PREFILL, DECODE = frozenset({Role.PREFILL}), frozenset({Role.DECODE})
BOTH = PREFILL | DECODE
LAYOUT = KvLayout("float32", 4, num_layers=1, num_kv_heads=1, head_dim=2)
MODEL = ModelInfo("tiny", "fp", "Tiny", "float32", 100, 1000, (2,))


def info(
    name: str,
    roles: frozenset[Role],
    transports: tuple[str, ...] = ("grpc",),
    layout: KvLayout = LAYOUT,
    model: ModelInfo = MODEL,
    num_blocks: int = 100,
) -> WorkerInfo:
    return WorkerInfo(
        key=WorkerKey(name, 1),
        roles=roles,
        model_name=model.name,
        model=model,
        kv_layouts=(layout,),
        transports=transports,
        control_address="127.0.0.1:1",
        kv_address="",
        host="here",
        capacity=Capacity(num_blocks, layout.block_size),
        labels={},
        protocol_version=PROTOCOL_VERSION,
    )


def view(worker: WorkerInfo, free: int = 100, usable: int = 100, queued: int = 0, room: int = 100) -> WorkerView:
    return WorkerView(
        info=worker,
        usable_blocks=usable,
        free_blocks=free,
        prefill_room=room,
        queued_prefill_tokens=queued,
        num_in_flight=0,
    )
