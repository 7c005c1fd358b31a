"""What came back for each request of a run, as the client saw it. Times in seconds from the run's begin."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any


class Outcome(StrEnum):
    """How a request ended.

    COMPLETED: with every token it should have. REJECTED: refused before any token (HTTP 429 or 503, gRPC
    RESOURCE_EXHAUSTED or UNAVAILABLE). FAILED: any other error, an error in mid-stream, an answer without tokens, or
    one shorter than its finish reason allows. CANCELLED: by us, as planned. UNFINISHED: still running, or not even
    sent, when the run's time was over.
    """

    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True)
class ServerTimings:
    """Where the server says that a request's time went; `prefill_worker` and `decode_worker` by name."""

    queue_s: float
    reserve_s: float
    prefill_s: float
    exposed_transfer_s: float
    decode_s: float
    ttft_s: float
    prefill_worker: str = ""
    decode_worker: str = ""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One event of a stream that carried output tokens: when it was read, and how many."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. `sent_s` None: never sent. `ended_s` None: unfinished.

    `num_output_tokens`: by the server's usage, or what was counted where there was none; `num_counted_tokens`: the sum
    over `events`. `counts_are_exact`: whether the protocol says how many tokens an event carries; else each counts one.
    `output`: text, or token ids joined by spaces, as the protocol has it.
    """

    number: int
    request_class: str
    tenant: str
    num_prompt_tokens: int
    max_tokens: int
    scheduled_s: float
    outcome: Outcome
    sent_s: float | None = None
    ended_s: float | None = None
    events: tuple[TokenEvent, ...] = ()
    num_output_tokens: int = 0
    num_counted_tokens: int = 0
    counts_are_exact: bool = True
    num_cached_tokens: int | None = None
    finish_reason: str = ""
    error: str = ""
    output: str = ""
    server: ServerTimings | None = None

    @property
    def ttft_s(self) -> float | None:
        """From the scheduled time, as a user would see it, to the first event that carried a token."""
        return self.events[0].at_s - self.scheduled_s if self.events else None

    @property
    def ttft_from_send_s(self) -> float | None:
        return self.events[0].at_s - self.sent_s if self.events and self.sent_s is not None else None

    @property
    def e2e_s(self) -> float | None:
        """From the scheduled time to the last token."""
        return self.events[-1].at_s - self.scheduled_s if self.events else None

    @property
    def itls_s(self) -> list[float]:
        """Gaps between the arrivals of neighbouring tokens, one fewer than tokens: 0 between those of one event."""
        times = [event.at_s for event in self.events for _ in range(event.num_tokens)]
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def tpot_s(self) -> float | None:
        """(last − first token) / (output tokens − 1); None with fewer than two."""
        if self.num_output_tokens < 2 or not self.events:
            return None
        return (self.events[-1].at_s - self.events[0].at_s) / (self.num_output_tokens - 1)

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "events": [[event.at_s, event.num_tokens] for event in self.events]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "RequestRecord":
        server = data["server"]
        fields: dict[str, Any] = {
            **data,
            "outcome": Outcome(data["outcome"]),
            "events": tuple(TokenEvent(at_s, num_tokens) for at_s, num_tokens in data["events"]),
            "server": None if server is None else ServerTimings(**server),
        }
        return RequestRecord(**fields)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What the load generator itself took and missed: its figures mean little where it was the limit.

    `loop_lag_*`: how late the event loop ran its timers. `dispatch_lag_*`: from a request's scheduled time until it was
    sent, a cap on concurrency included. `cores`: CPU time of this process ÷ wall time.
    """

    loop_lag_p99_s: float
    loop_lag_max_s: float
    dispatch_lag_p99_s: float
    cores: float
    peak_in_flight: int


@dataclass(frozen=True, slots=True)
class ServerSample:
    """What a server showed of itself at one moment, by the names of its metrics, labels included."""

    at_s: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of a plan on one server. `begin_unix_s`: the run's begin on the wall clock. `duration_s`: to its end.

    `server_cpu_s`: CPU seconds of the server's processes during the run, by their name. `foreign_cores`: what others
    took. `interrupted`: Ctrl-C cut it short.
    """

    name: str
    about: Mapping[str, object]
    begin_unix_s: float
    duration_s: float
    records: tuple[RequestRecord, ...]
    limits: ClientLimits
    foreign_cores: float = 0.0
    server_cpu_s: Mapping[str, float] = field(default_factory=dict[str, float])
    samples: tuple[ServerSample, ...] = ()
    interrupted: bool = False

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "records": [record.to_json() for record in self.records]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "RunResult":
        fields: dict[str, Any] = {
            **data,
            "records": tuple(RequestRecord.from_json(record) for record in data["records"]),
            "limits": ClientLimits(**data["limits"]),
            "samples": tuple(ServerSample(**sample) for sample in data["samples"]),
        }
        return RunResult(**fields)
