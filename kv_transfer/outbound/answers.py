"""What a receiver's answers mean to a link, whatever carried them: a value, a refusal, or a pair out of step."""

from kv_transfer import transfer_wire as wire
from kv_transfer.messages import STALE_PAIR_PARAM, Busy, Ready
from kv_transfer.outbound.link import ChunkBatch, PairBroken
from pdserve.client.wire import error_from_proto
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.v1 import kv_transfer_pb2 as pb


def prepared(answer: pb.PrepareResponse) -> Ready | Busy:
    """Raises what a link's `prepare` does."""
    result = wire.prepared_from_proto(answer)
    if result is None:
        raise PairBroken("Prepare was answered by nothing that this version knows")
    if isinstance(result, PdserveError):
        raise refusal_to_raise(result)
    return result


def acknowledged(ack: pb.ChunksAck, batch: ChunkBatch, num_chunks: int) -> int:
    """The next sequence number. Raises what a link's `send` does."""
    if ack.HasField("error"):
        raise refusal_to_raise(error_from_proto(ack.error))
    expected = (batch.first_sequence + num_chunks, batch.first_block + len(batch.block_ids))
    if (ack.next_sequence, ack.num_blocks_received) != expected:
        raise PairBroken(f"chunks were answered by {ack.next_sequence, ack.num_blocks_received}, not {expected}")
    return ack.next_sequence


def committed(answer: pb.CommitResponse) -> None:
    """Raises what a link's `commit` does."""
    if answer.HasField("error"):
        raise refusal_to_raise(error_from_proto(answer.error))
    if not answer.HasField("done"):
        raise PairBroken("Commit was answered by nothing that this version knows")


def refusal_to_raise(error: PdserveError) -> Exception:
    """Some errors of a transfer say that the pair itself is out of step."""
    if error.reason is ErrorReason.TRANSFER_FAILED or error.param == STALE_PAIR_PARAM:
        return PairBroken(error.message)
    return error
