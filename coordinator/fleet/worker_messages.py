"""Between the coordinator's values of workers and their protobuf messages; no decisions are taken here."""

from coordinator.fleet.values import (
    Capacity,
    Denied,
    Granted,
    Role,
    Target,
    WorkerInfo,
    WorkerKey,
    WorkerLoad,
    WorkerOutput,
)
from coordinator.sequences import SequenceRequest
from pdserve.client.wire import (
    error_from_proto,
    finish_reason_from_proto,
    kv_layout_from_proto,
    kv_layout_to_proto,
    logprobs_from_proto,
    model_info_from_proto,
    sampling_to_proto,
    sequence_id_from_proto,
    sequence_id_to_proto,
)
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.sampling import FinishReason
from pdserve.serving.load import TransportTotals
from pdserve.v1 import fleet_pb2, worker_pb2

ROLE_TO_PROTO = {Role.PREFILL: fleet_pb2.ROLE_PREFILL, Role.DECODE: fleet_pb2.ROLE_DECODE}
_ROLE_FROM_PROTO = {value: role for role, value in ROLE_TO_PROTO.items()}


def worker_key_to_proto(key: WorkerKey) -> fleet_pb2.WorkerId:
    return fleet_pb2.WorkerId(worker_id=key.worker_id, incarnation=key.incarnation)


def worker_key_from_proto(message: fleet_pb2.WorkerId) -> WorkerKey:
    return WorkerKey(message.worker_id, message.incarnation)


def worker_info_from_proto(message: fleet_pb2.RegisterRequest) -> WorkerInfo:
    """Roles that this version does not know are left out."""
    capacity = message.capacity
    return WorkerInfo(
        key=worker_key_from_proto(message.worker),
        roles=frozenset(_ROLE_FROM_PROTO[role] for role in message.roles if role in _ROLE_FROM_PROTO),
        model_name=message.model_name or message.model.name,
        model=model_info_from_proto(message.model),
        kv_layouts=tuple(kv_layout_from_proto(layout) for layout in message.kv_layouts),
        transports=tuple(message.transports),
        control_address=message.control_address,
        kv_address=message.kv_address,
        host=message.host,
        capacity=Capacity(
            capacity.num_blocks,
            capacity.block_size,
            capacity.max_batch_size,
            capacity.token_budget,
            capacity.memory_bytes,
        ),
        labels=dict(message.labels),
        protocol_version=message.protocol_version,
        roles_epoch=message.roles_epoch,
    )


def load_from_proto(message: fleet_pb2.LoadReport) -> WorkerLoad:
    return WorkerLoad(
        ledger_version=message.ledger_version,
        step_count=message.step_count,
        has_work=message.has_work,
        draining=message.draining,
        queued_prefill_tokens=message.queued_prefill_tokens,
        num_waiting=message.num_waiting,
        num_running=message.num_running,
        num_transferring=message.num_transferring,
        num_free_blocks=message.num_free_blocks,
        num_reserved_blocks=message.num_reserved_blocks,
        num_usable_blocks=message.num_usable_blocks,
        num_cached_blocks=message.num_cached_blocks,
        prefix_queries=message.totals.prefix_queries,
        prefix_hits=message.totals.prefix_hits,
        transports={
            one.transport: TransportTotals(one.num_completed, one.num_failed, one.num_bytes, one.seconds)
            for one in message.totals.transports
        },
    )


def context_to_proto(
    sequence_id: SequenceId, request: SequenceRequest, remaining_s: float
) -> worker_pb2.RequestContext:
    return worker_pb2.RequestContext(
        request_id=sequence_id_to_proto(sequence_id),
        deadline_remaining_ms=max(1, int(remaining_s * 1000)),
        traceparent=request.traceparent,
        request_class=request.request_class,
        tenant=request.tenant,
        model=request.model,
        adapter=request.adapter,
        cache_salt=request.cache_salt,
    )


def reserve_to_proto(context: worker_pb2.RequestContext, request: SequenceRequest) -> worker_pb2.ReserveRequest:
    return worker_pb2.ReserveRequest(
        context=context,
        num_tokens_max=request.num_tokens_max,
        num_tokens_expected=request.num_tokens_max,
        token_ids=request.token_ids,
    )


def reserve_from_proto(message: worker_pb2.ReserveResponse) -> Granted | Denied:
    """Raises: PdserveError INTERNAL for an answer that is neither."""
    if message.HasField("granted"):
        granted = message.granted
        return Granted(granted.reservation_id, granted.num_blocks, granted.num_cached_blocks)
    if message.HasField("denied"):
        denied = message.denied
        return Denied(denied.needed, denied.free, denied.ledger_version, denied.never_fits)
    raise PdserveError(ErrorReason.INTERNAL, "a decode worker neither granted nor denied a reservation")


def prefill_submit_to_proto(
    context: worker_pb2.RequestContext, request: SequenceRequest, target: Target | None
) -> worker_pb2.PrefillSubmit:
    return worker_pb2.PrefillSubmit(
        context=context,
        token_ids=request.token_ids,
        num_prompt_tokens=len(request.token_ids),
        first_output_index=0,
        sampling=sampling_to_proto(request.sampling),
        target=None if target is None else _target_to_proto(target),
    )


def _target_to_proto(target: Target) -> worker_pb2.DecodeTarget:
    return worker_pb2.DecodeTarget(
        worker=worker_key_to_proto(target.worker.key),
        kv_address=target.worker.kv_address,
        host=target.worker.host,
        reservation_id=target.reservation_id,
        transport=target.transport,
        kv_layout=kv_layout_to_proto(target.kv_layout),
        num_cached_blocks=target.num_cached_blocks,
    )


def decode_submit_to_proto(
    context: worker_pb2.RequestContext, request: SequenceRequest, reservation_id: int
) -> worker_pb2.DecodeSubmit:
    return worker_pb2.DecodeSubmit(
        context=context,
        reservation_id=reservation_id,
        token_ids=request.token_ids,
        num_prompt_tokens=len(request.token_ids),
        first_output_index=0,
        sampling=sampling_to_proto(request.sampling),
    )


def output_from_proto(message: worker_pb2.SequenceOutput) -> WorkerOutput:
    """An output that ends in error always has one."""
    finish_reason = finish_reason_from_proto(message.finish_reason)
    error = error_from_proto(message.error) if message.HasField("error") else None
    if finish_reason is FinishReason.ERROR and error is None:
        error = PdserveError(ErrorReason.INTERNAL, "a worker failed without saying why")
    if finish_reason is FinishReason.CANCELLED and error is None:
        error = PdserveError(ErrorReason.CANCELLED, "a worker cancelled the sequence")
    return WorkerOutput(
        sequence_id=sequence_id_from_proto(message.request_id),
        first_index=message.first_index,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(logprobs_from_proto(entry) for entry in message.logprobs),
        prompt_logprobs=tuple(logprobs_from_proto(entry) for entry in message.prompt_logprobs),
        finish_reason=finish_reason,
        error=error,
        transferred=message.transferred,
        exposed_transfer_s=message.durations.exposed_transfer_us / 1e6,
        num_cached_tokens=message.num_cached_tokens,
    )
