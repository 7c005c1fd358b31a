"""Every failure a user or a peer can be told of: one exception type, one enum of reasons, one table of their codes.

PdserveError
 └─ reason: ErrorReason ──► ERROR_CODES[reason] = (gRPC status name, HTTP status, OpenAI type, retryable)

Knows nothing about gRPC or HTTP beyond those names and numbers.
"""

from dataclasses import dataclass
from enum import Enum


class ErrorReason(Enum):
    """Why a request was refused or ended early; the wire carries the name."""

    INVALID_ARGUMENT = "invalid_argument"
    UNSUPPORTED = "unsupported"
    MODEL_NOT_FOUND = "model_not_found"
    UNAUTHENTICATED = "unauthenticated"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    NEVER_FITS = "never_fits"
    QUEUE_FULL = "queue_full"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    NO_WORKERS = "no_workers"
    DRAINING = "draining"
    WORKER_LOST = "worker_lost"
    TRANSFER_FAILED = "transfer_failed"
    INCOMPATIBLE_PEER = "incompatible_peer"
    STALE = "stale"
    SLOW_CONSUMER = "slow_consumer"
    CANCELLED = "cancelled"
    NUMERICAL_ERROR = "numerical_error"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class ErrorCodes:
    """How one reason shows at each edge."""

    grpc_status: str
    http_status: int
    openai_type: str
    retryable: bool


ERROR_CODES: dict[ErrorReason, ErrorCodes] = {
    ErrorReason.INVALID_ARGUMENT: ErrorCodes("INVALID_ARGUMENT", 400, "invalid_request_error", False),
    ErrorReason.UNSUPPORTED: ErrorCodes("INVALID_ARGUMENT", 400, "invalid_request_error", False),
    ErrorReason.MODEL_NOT_FOUND: ErrorCodes("NOT_FOUND", 404, "invalid_request_error", False),
    ErrorReason.UNAUTHENTICATED: ErrorCodes("UNAUTHENTICATED", 401, "authentication_error", False),
    ErrorReason.PAYLOAD_TOO_LARGE: ErrorCodes("INVALID_ARGUMENT", 413, "invalid_request_error", False),
    ErrorReason.NEVER_FITS: ErrorCodes("INVALID_ARGUMENT", 400, "invalid_request_error", False),
    ErrorReason.QUEUE_FULL: ErrorCodes("RESOURCE_EXHAUSTED", 429, "rate_limit_error", True),
    ErrorReason.DEADLINE_EXCEEDED: ErrorCodes("DEADLINE_EXCEEDED", 504, "timeout_error", True),
    ErrorReason.NO_WORKERS: ErrorCodes("UNAVAILABLE", 503, "server_error", True),
    ErrorReason.DRAINING: ErrorCodes("UNAVAILABLE", 503, "server_error", True),
    ErrorReason.WORKER_LOST: ErrorCodes("UNAVAILABLE", 503, "server_error", True),
    ErrorReason.TRANSFER_FAILED: ErrorCodes("UNAVAILABLE", 503, "server_error", True),
    ErrorReason.INCOMPATIBLE_PEER: ErrorCodes("FAILED_PRECONDITION", 503, "server_error", False),
    ErrorReason.STALE: ErrorCodes("FAILED_PRECONDITION", 503, "server_error", True),
    ErrorReason.SLOW_CONSUMER: ErrorCodes("RESOURCE_EXHAUSTED", 503, "server_error", True),
    ErrorReason.CANCELLED: ErrorCodes("CANCELLED", 499, "cancelled_error", True),
    ErrorReason.NUMERICAL_ERROR: ErrorCodes("INTERNAL", 500, "server_error", False),
    ErrorReason.INTERNAL: ErrorCodes("INTERNAL", 500, "server_error", False),
}


class PdserveError(Exception):
    """A typed failure.

    Args:
        reason: what kind of failure.
        message: one sentence for the user, with true numbers and no prompt text.
        param: the request field at fault, if one is.
        retry_after_s: an honest hint, if there is one.
    """

    def __init__(
        self, reason: ErrorReason, message: str, *, param: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def codes(self) -> ErrorCodes:
        return ERROR_CODES[self.reason]

    @property
    def retryable(self) -> bool:
        return self.codes.retryable

    def __str__(self) -> str:
        return f"{self.reason.name}: {self.message}"


def invalid(message: str, param: str) -> PdserveError:
    """The commonest refusal: `param` of the request is wrong, and `message` says how."""
    return PdserveError(ErrorReason.INVALID_ARGUMENT, message, param=param)
