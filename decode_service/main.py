"""The decode worker's process."""

from collections.abc import Callable

from decode_service.inbound_host import DecodeInboundHost
from decode_service.scheduler import DecodeScheduler
from decode_service.service import DecodeService
from decode_service.stage import DecodeStage
from kv_transfer.messages import WorkerIdentity
from kv_transfer.receiver import KvReceiver
from pdserve.serving.settings import Settings
from pdserve.v1 import worker_pb2_grpc
from pdserve.worker.parts import Worker, WorkerParts
from pdserve.worker.process import run_worker
from pdserve_kernels.host_memory import CAN_SHARE


def run(settings: Settings, ready: Callable[[dict[str, object]], None]) -> int:
    """Serve until drained; returns the exit code."""
    return run_worker(settings, ready, ("decode",), build)


def build(parts: WorkerParts) -> Worker:
    """KV in, tokens out. On the event loop."""
    worker = parts.settings.worker
    stage = DecodeStage(DecodeScheduler(worker.max_batch_size), parts.resources)
    engine = parts.engine([stage])
    service = DecodeService(parts.incarnation, parts.loaded.model_info, parts.ledger, engine, stage, parts.announce)
    receiver = kv_receiver(parts, DecodeInboundHost(service.requests, engine, stage))
    service.requests.cancel_inbound = lambda reservation: receiver.cancel(reservation.reservation_id)
    return Worker(
        engine=engine,
        services=(service,),
        add_to_server=lambda server: worker_pb2_grpc.add_DecodeServicer_to_server(service, server),
        kv_port=receiver.start(worker.host, worker.kv_port),
        transports=receiver.transports,
        close=receiver.close,
    )


def kv_receiver(parts: WorkerParts, host: DecodeInboundHost) -> KvReceiver:
    """From other processes, here and elsewhere."""
    return KvReceiver(
        WorkerIdentity(parts.worker_id, parts.incarnation),
        parts.loaded.model_info.fingerprint,
        parts.loaded.paged_kv,
        host,
        parts.settings.transfer,
        with_shm=CAN_SHARE and parts.settings.model.device == "cpu" and "shm" in parts.settings.transfer.transports,
    )
