"""PdserveError across a gRPC call: status and trailing metadata one way, the exception the other."""

from typing import Any, NoReturn

import grpc
import grpc.aio

from pdserve.client.wire import error_from_proto, error_to_proto
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.v1 import common_pb2 as pb

ERROR_METADATA_KEY = "pdserve-error-bin"

# For statuses that no pdserve server set: the transport's own, or a proxy's.
_REASON_BY_STATUS = {
    grpc.StatusCode.CANCELLED: ErrorReason.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorReason.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE: ErrorReason.WORKER_LOST,
    grpc.StatusCode.INVALID_ARGUMENT: ErrorReason.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorReason.PAYLOAD_TOO_LARGE,
    grpc.StatusCode.UNAUTHENTICATED: ErrorReason.UNAUTHENTICATED,
}


def grpc_status(error: PdserveError) -> grpc.StatusCode:
    return grpc.StatusCode[error.codes.grpc_status]


def error_metadata(error: PdserveError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata that carries `error` whole."""
    return ((ERROR_METADATA_KEY, error_to_proto(error).SerializeToString()),)


async def abort_with(context: "grpc.aio.ServicerContext[Any, Any]", error: PdserveError) -> NoReturn:
    """End an asyncio server's call with `error`."""
    await context.abort(grpc_status(error), error.message, error_metadata(error))
    raise AssertionError("abort always raises")


def error_from_rpc(rpc_error: grpc.RpcError) -> PdserveError:
    """The PdserveError a server sent, or the nearest to a bare status. Takes sync and aio errors."""
    code = getattr(rpc_error, "code", lambda: None)()
    details = getattr(rpc_error, "details", lambda: None)() or ""
    for key, value in getattr(rpc_error, "trailing_metadata", lambda: None)() or ():
        if key == ERROR_METADATA_KEY and isinstance(value, bytes):
            return error_from_proto(pb.ErrorInfo.FromString(value))
    reason = _REASON_BY_STATUS.get(code, ErrorReason.INTERNAL) if code is not None else ErrorReason.INTERNAL
    name = code.name if code is not None else "UNKNOWN"
    return PdserveError(reason, f"{name}: {details}")
