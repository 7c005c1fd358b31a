"""The prefill worker's process."""

from collections.abc import Callable

from kv_transfer.messages import WorkerIdentity
from kv_transfer.selector import TransportSelector
from kv_transfer.sender import NetworkKvSender
from pdserve.serving.settings import Settings
from pdserve.v1 import worker_pb2_grpc
from pdserve.worker.parts import Worker, WorkerParts
from pdserve.worker.process import run_worker
from prefill_service.scheduler import PrefillScheduler
from prefill_service.service import PrefillService
from prefill_service.stage import PrefillStage


def run(settings: Settings, ready: Callable[[dict[str, object]], None]) -> int:
    """Serve until drained; returns the exit code."""
    return run_worker(settings, ready, ("prefill",), build)


def build(parts: WorkerParts) -> Worker:
    """Prompts in, KV out."""
    limits = parts.settings.prefill
    stage = PrefillStage(PrefillScheduler(limits.token_budget, limits.max_bypasses), parts.resources)
    engine = parts.engine([stage])
    network = network_sender(parts)
    sender = TransportSelector(parts.settings.transfer.transports, dict.fromkeys(network.transports, network))
    service = PrefillService(parts.incarnation, parts.loaded.model_info, parts.ledger, engine, stage, sender)
    return Worker(
        engine=engine,
        services=(service,),
        add_to_server=lambda server: worker_pb2_grpc.add_PrefillServicer_to_server(service, server),
        kv_port=0,
        transports=sender.transports,
        close=sender.close,
    )


def network_sender(parts: WorkerParts) -> NetworkKvSender:
    """To other processes, here and elsewhere."""
    return NetworkKvSender(
        parts.loaded.paged_kv,
        WorkerIdentity(parts.worker_id, parts.incarnation),
        parts.loaded.model_info.fingerprint,
        parts.settings.transfer,
        shared_fd=parts.loaded.paged_kv.shared_fd,
    )
