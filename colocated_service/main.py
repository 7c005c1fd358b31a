"""The colocated worker's process: both roles on one engine, one pool and one ledger, behind the same RPCs.

A step is one forward of all decode rows plus a prefill chunk. A prompt's blocks live under its decode reservation from
its first chunk on, and are handed over as they are. KV may also come from, and go to, other workers.
"""

import time
from collections.abc import Callable

import grpc.aio

from decode_service.inbound_host import DecodeInboundHost
from decode_service.main import kv_receiver
from decode_service.scheduler import DecodeScheduler
from decode_service.service import DecodeService
from decode_service.stage import DecodeStage
from kv_transfer.interfaces import InboundCommit, KvSender
from kv_transfer.local import LocalKvSender
from kv_transfer.selector import TransportSelector
from pdserve.engine.block_pool import OwnerKind
from pdserve.engine.ledger import Reservation
from pdserve.serving.settings import Settings
from pdserve.v1 import worker_pb2_grpc
from pdserve.worker.parts import Worker, WorkerParts
from pdserve.worker.process import run_worker
from prefill_service.main import network_sender
from prefill_service.scheduler import PrefillScheduler
from prefill_service.service import PrefillService
from prefill_service.stage import PrefillStage


def run(settings: Settings, ready: Callable[[dict[str, object]], None]) -> int:
    """Serve until drained; returns the exit code."""
    return run_worker(settings, ready, ("prefill", "decode"), build)


def build(parts: WorkerParts) -> Worker:
    """Prompts in, tokens out. On the event loop."""
    settings, model = parts.settings, parts.loaded.model_info
    decode_stage = DecodeStage(DecodeScheduler(settings.worker.max_batch_size), parts.resources)
    scheduler = PrefillScheduler(settings.colocated.token_budget, settings.prefill.max_bypasses)
    prefill_stage = PrefillStage(scheduler, parts.resources)
    engine = parts.engine([decode_stage, prefill_stage])

    def ledger_changed() -> None:
        prefill.requests.admit_waiting()
        parts.announce()

    decode = DecodeService(parts.incarnation, model, parts.ledger, engine, decode_stage, ledger_changed)
    receiver = kv_receiver(parts, DecodeInboundHost(decode.requests, engine, decode_stage))

    def hand_over(commit: InboundCommit) -> None:
        decode.requests.check_live(commit.sequence_id, commit.reservation_id)
        decode_stage.adopt(commit, OwnerKind.OUTBOUND, time.monotonic())

    network = network_sender(parts)
    both_ways = [transport for transport in network.transports if transport in receiver.transports]
    senders: dict[str, KvSender] = {"local": LocalKvSender(hand_over), **dict.fromkeys(both_ways, network)}
    sender = TransportSelector(settings.transfer.transports, senders)
    prefill = PrefillService(parts.incarnation, model, parts.ledger, engine, prefill_stage, sender, decode.requests)

    def cancel_inbound(reservation: Reservation) -> None:
        prefill.requests.cancel(reservation.sequence_id)
        receiver.cancel(reservation.reservation_id)

    decode.requests.cancel_inbound = cancel_inbound

    def add_to_server(server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_PrefillServicer_to_server(prefill, server)
        worker_pb2_grpc.add_DecodeServicer_to_server(decode, server)

    def close() -> None:
        sender.close()
        receiver.close()

    return Worker(
        engine=engine,
        services=(decode, prefill),
        add_to_server=add_to_server,
        kv_port=receiver.start(settings.worker.host, settings.worker.kv_port),
        transports=sender.transports,
        close=close,
    )
