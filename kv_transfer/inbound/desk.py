"""Answers a sender's control messages, whatever carried them: protobuf in and out; transfers.py knows the meaning."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer import transfer_wire as wire
from kv_transfer.handshake import Terms, check_receiver, check_terms
from kv_transfer.inbound.transfers import InboundTransfers
from kv_transfer.messages import PairKey, WorkerIdentity
from pdserve.client.wire import PROTOCOL_VERSION, error_to_proto
from pdserve.core.errors import PdserveError
from pdserve.core.model_info import KvLayout
from pdserve.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Desk:
    """What all transports of one receiver share. Errors of a transfer are part of its answers."""

    identity: WorkerIdentity
    model_fingerprint: str
    layout: KvLayout
    transfers: InboundTransfers
    clock: Callable[[], float] = time.monotonic

    def shake_hands(self, request: pb.HandshakeRequest, transport: str) -> pb.HandshakeResponse:
        """Open the pair.

        Raises:
            PdserveError: STALE, INCOMPATIBLE_PEER: there is to be none.
        """
        try:
            check_receiver(wire.identity_from_proto(request.receiver), self.identity)
            ours = Terms(PROTOCOL_VERSION, self.model_fingerprint, self.layout, transport)
            check_terms(wire.terms_from_proto(request), ours)
            self.transfers.open_pair(wire.identity_from_proto(request.sender), request.epoch)
        except PdserveError as error:
            logger.warning("refused a handshake of %s over %s: %s", request.sender.worker_id, transport, error)
            raise
        return pb.HandshakeResponse(epoch=request.epoch)

    def prepare(self, request: pb.PrepareRequest) -> pb.PrepareResponse:
        try:
            order = wire.prepare_from_proto(request)
            result = self.transfers.prepare(wire.pair_from_proto(request), order, self.clock())
        except PdserveError as error:
            return wire.prepared_to_proto(error)
        return wire.prepared_to_proto(result)

    def commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        try:
            self.transfers.commit(wire.pair_from_proto(request), wire.commit_from_proto(request))
        except PdserveError as error:
            return wire.committed_to_proto(error)
        return wire.committed_to_proto(None)

    def abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        self.transfers.abort(wire.pair_from_proto(request), request.transfer_id, request.reason)
        return pb.AbortResponse()

    def progress(self, pair: PairKey, transfer_id: int) -> pb.ChunksAck:
        try:
            progress = self.transfers.progress(pair, transfer_id)
        except PdserveError as error:
            return pb.ChunksAck(error=error_to_proto(error))
        return pb.ChunksAck(next_sequence=progress.next_sequence, num_blocks_received=progress.num_blocks_received)
