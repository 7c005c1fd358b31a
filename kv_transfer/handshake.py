"""Whether two workers may exchange KV: compared once per pair, before any byte moves. Keeps no state."""

from dataclasses import dataclass

from kv_transfer.messages import WorkerIdentity, stale
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_info import KvLayout


@dataclass(frozen=True, slots=True)
class Terms:
    """What one side brings: `protocol_version`, the model's fingerprint, the KV's layout, and the transport."""

    protocol_version: int
    model_fingerprint: str
    kv_layout: KvLayout
    transport: str


def check_receiver(addressed: WorkerIdentity, receiver: WorkerIdentity) -> None:
    """The sender must be talking to whom it believes.

    Raises:
        PdserveError: STALE: another worker, or another run of it, answers at this address.
    """
    if addressed != receiver:
        raise stale(
            f"receiver: {_name(addressed)} was addressed, but this is {_name(receiver)}: the worker there was replaced"
        )


def check_terms(offered: Terms, ours: Terms) -> None:
    """Neighbouring protocol versions interoperate; everything else must be equal.

    Raises:
        PdserveError: INCOMPATIBLE_PEER, naming each field that differs with (sender's, receiver's) value.
    """
    differences: list[str] = []
    if abs(offered.protocol_version - ours.protocol_version) > 1:
        differences.append(f"protocol_version ({offered.protocol_version}, {ours.protocol_version})")
    if offered.model_fingerprint != ours.model_fingerprint:
        differences.append(f"model_fingerprint ({offered.model_fingerprint}, {ours.model_fingerprint})")
    differences += [f"kv_layout.{difference}" for difference in offered.kv_layout.differences(ours.kv_layout)]
    if offered.transport != ours.transport:
        differences.append(f"transport ({offered.transport}, {ours.transport})")
    if differences:
        raise PdserveError(
            ErrorReason.INCOMPATIBLE_PEER, "sender and receiver differ in " + ", ".join(differences), param="handshake"
        )


def _name(identity: WorkerIdentity) -> str:
    return f"{identity.worker_id}/{identity.incarnation:016x}"
