"""What all links of one sender share."""

from dataclasses import dataclass

from kv_transfer.handshake import Terms
from kv_transfer.interfaces import Peer
from kv_transfer.messages import WorkerIdentity
from kv_transfer.transfer_wire import handshake_to_proto
from pdserve.client.wire import PROTOCOL_VERSION
from pdserve.engine.interfaces import BlockStore
from pdserve.v1 import kv_transfer_pb2 as pb


@dataclass(frozen=True, slots=True)
class Source:
    """Whose blocks go out, and how large a chunk of them may be."""

    identity: WorkerIdentity
    model_fingerprint: str
    store: BlockStore
    chunk_bytes: int

    def handshake(self, peer: Peer, epoch: int, transport: str) -> pb.HandshakeRequest:
        receiver = WorkerIdentity(peer.worker_id, peer.incarnation)
        terms = Terms(PROTOCOL_VERSION, self.model_fingerprint, self.store.layout, transport)
        return handshake_to_proto(self.identity, receiver, epoch, terms)
