"""Between the transfer's values and their protobuf messages, both ways; and the names that gRPC knows chunks by."""

from kv_transfer.handshake import Terms
from kv_transfer.messages import Busy, CommitOrder, PairKey, PrepareOrder, Ready, WorkerIdentity
from pdserve.client.wire import (
    error_from_proto,
    error_to_proto,
    kv_layout_from_proto,
    kv_layout_to_proto,
    sequence_id_from_proto,
    sequence_id_to_proto,
)
from pdserve.core.errors import PdserveError
from pdserve.v1 import fleet_pb2 as fleet_pb
from pdserve.v1 import kv_transfer_pb2 as pb

SERVICE = "pdserve.v1.KvTransfer"
SEND_CHUNKS = "SendChunks"
INCARNATION_KEY = "pdserve-sender-incarnation"
EPOCH_KEY = "pdserve-epoch"


def handshake_to_proto(
    sender: WorkerIdentity, receiver: WorkerIdentity, epoch: int, terms: Terms
) -> pb.HandshakeRequest:
    return pb.HandshakeRequest(
        protocol_version=terms.protocol_version,
        sender=_identity_to_proto(sender),
        receiver=_identity_to_proto(receiver),
        epoch=epoch,
        model_fingerprint=terms.model_fingerprint,
        kv_layout=kv_layout_to_proto(terms.kv_layout),
        transport=terms.transport,
    )


def identity_from_proto(message: fleet_pb.WorkerId) -> WorkerIdentity:
    return WorkerIdentity(message.worker_id, message.incarnation)


def terms_from_proto(message: pb.HandshakeRequest) -> Terms:
    return Terms(
        protocol_version=message.protocol_version,
        model_fingerprint=message.model_fingerprint,
        kv_layout=kv_layout_from_proto(message.kv_layout),
        transport=message.transport,
    )


def pair_from_proto(message: pb.PrepareRequest | pb.CommitRequest | pb.AbortRequest) -> PairKey:
    return PairKey(message.sender_incarnation, message.epoch)


def prepare_to_proto(pair: PairKey, order: PrepareOrder) -> pb.PrepareRequest:
    return pb.PrepareRequest(
        sender_incarnation=pair.incarnation,
        epoch=pair.epoch,
        transfer_id=order.transfer_id,
        request_id=sequence_id_to_proto(order.sequence_id),
        reservation_id=order.reservation_id,
        num_tokens=order.num_tokens,
        num_blocks=order.num_blocks,
        first_block=order.first_block,
        deadline_remaining_ms=max(0, round(order.deadline_remaining_s * 1000)),
    )


def prepare_from_proto(message: pb.PrepareRequest) -> PrepareOrder:
    return PrepareOrder(
        transfer_id=message.transfer_id,
        sequence_id=sequence_id_from_proto(message.request_id),
        reservation_id=message.reservation_id,
        num_tokens=message.num_tokens,
        num_blocks=message.num_blocks,
        first_block=message.first_block,
        deadline_remaining_s=message.deadline_remaining_ms / 1000,
    )


def prepared_to_proto(result: Ready | Busy | PdserveError) -> pb.PrepareResponse:
    match result:
        case Ready():
            ready = pb.PrepareResponse.Ready(lease_ms=round(result.lease_s * 1000), block_ids=result.block_ids)
            return pb.PrepareResponse(ready=ready)
        case Busy():
            return pb.PrepareResponse(busy=pb.PrepareResponse.Busy(retry_after_ms=round(result.retry_after_s * 1000)))
        case PdserveError():
            return pb.PrepareResponse(error=error_to_proto(result))


def prepared_from_proto(message: pb.PrepareResponse) -> Ready | Busy | PdserveError | None:
    """None: an answer that this version does not know."""
    match message.WhichOneof("result"):
        case "ready":
            return Ready(message.ready.lease_ms / 1000, tuple(message.ready.block_ids))
        case "busy":
            return Busy(message.busy.retry_after_ms / 1000)
        case "error":
            return error_from_proto(message.error)
        case None:
            return None


def commit_to_proto(pair: PairKey, order: CommitOrder) -> pb.CommitRequest:
    return pb.CommitRequest(
        sender_incarnation=pair.incarnation,
        epoch=pair.epoch,
        transfer_id=order.transfer_id,
        num_tokens=order.num_tokens,
        num_blocks=order.num_blocks,
        num_chunks=order.num_chunks,
        output_token_ids=order.output_token_ids,
        since_prefill_end_us=max(0, round(order.since_prefill_end_s * 1e6)),
    )


def commit_from_proto(message: pb.CommitRequest) -> CommitOrder:
    return CommitOrder(
        transfer_id=message.transfer_id,
        num_tokens=message.num_tokens,
        num_blocks=message.num_blocks,
        num_chunks=message.num_chunks,
        output_token_ids=tuple(message.output_token_ids),
        since_prefill_end_s=message.since_prefill_end_us / 1e6,
    )


def committed_to_proto(error: PdserveError | None) -> pb.CommitResponse:
    if error is None:
        return pb.CommitResponse(done=pb.CommitResponse.Done())
    return pb.CommitResponse(error=error_to_proto(error))


def _identity_to_proto(identity: WorkerIdentity) -> fleet_pb.WorkerId:
    return fleet_pb.WorkerId(worker_id=identity.worker_id, incarnation=identity.incarnation)
