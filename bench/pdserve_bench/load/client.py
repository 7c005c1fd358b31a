"""What the load generator needs of a protocol. Each protocol has a module beside this one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pdserve_bench.load.plan import PlannedRequest
from pdserve_bench.load.records import ServerTimings

NoteTokens = Callable[[int], None]
"""Called at once for each event that carries output tokens, with their number."""


class RequestError(Exception):
    """A request ended with an error; `rejected`: it was refused before any token, for want of room or of workers."""

    def __init__(self, message: str, *, rejected: bool = False) -> None:
        super().__init__(message)
        self.rejected = rejected


@dataclass(frozen=True, slots=True)
class Answer:
    """How a stream ended. `num_output_tokens` None: the server gave no usage. `counts_are_exact`, `output`, `server`:
    see `RequestRecord`."""

    finish_reason: str
    num_output_tokens: int | None
    num_cached_tokens: int | None
    counts_are_exact: bool
    output: str
    server: ServerTimings | None = None


class LoadClient(Protocol):
    """Any number of requests at a time over one object, from one event loop."""

    async def send(self, request: PlannedRequest, note: NoteTokens) -> Answer:
        """Greedy, with `ignore_eos`, so that it yields exactly `max_tokens` tokens. Cancelling the task hangs up.

        Raises:
            RequestError: the server refused it or broke it off, or nobody answers.
        """
        ...

    async def close(self) -> None: ...
