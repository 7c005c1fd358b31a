"""A fleet on this machine: starts a coordinator and workers, watches over them, and ends them in order.

    STARTING ──► SERVING ──► STOPPING ──► ended
        └── a child dies, or a signal ──► ┘

Imports neither gRPC nor torch; what the children do is not its business.
"""

import logging
import queue
import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from pdserve.launch.plan import ChildPlan, Machine, check_plan, plan_coordinator, plan_workers, sharing_warning
from pdserve.launch.process import ChildProcess, CommandBuilder, Exited, Started, child_command
from pdserve.launch.roles import COORDINATOR, warn_of_overridden
from pdserve.serving.settings import Settings

START_TIMEOUT_S = 900.0
KILL_TIMEOUT_S = 10.0
GRACE_S = 5.0
"""Beyond a child's own drain, before it is killed."""
INSISTENCE_S = 1.0
"""Two signals closer than this are one wish (a group's and its forwarded copy); a later one means: at once."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StopRequested:
    at_s: float


Event = Started | Exited | StopRequested


@dataclass(frozen=True, slots=True)
class RunningFleet:
    """What a user needs to know of a fleet that serves. Worker infos are in order of their plans."""

    host: str
    http_port: int
    grpc_port: int
    workers: tuple[tuple[ChildPlan, dict[str, object]], ...]


class LocalFleet:
    """One fleet, run once, from the main thread.

    Args:
        on_ready: called when every child serves.
        command: how a role is executed.

    Raises:
        PdserveError: INVALID_ARGUMENT, if the settings cannot work on one machine.
    """

    def __init__(
        self,
        settings: Settings,
        machine: Machine,
        on_ready: Callable[[RunningFleet], None],
        command: CommandBuilder = child_command,
    ) -> None:
        check_plan(settings, machine)
        self._settings = settings
        self._machine = machine
        self._on_ready = on_ready
        self._command = command
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._children: dict[str, ChildProcess] = {}

    def run(self) -> int:
        """Start, serve until a signal or the coordinator's end, stop. Returns 0 after a clean stop, else 1."""
        with _stop_signals(self._request_stop):
            try:
                code = self._serve()
                return code if self._stop() else 1
            finally:
                self._kill_rest()

    def _serve(self) -> int:
        if warning := sharing_warning(self._settings, self._machine):
            _log.warning("%s", warning)
        warn_of_overridden(self._settings.worker.threads)
        self._spawn(plan_coordinator(self._settings))
        infos = self._await_started({COORDINATOR})
        if isinstance(infos, int):
            return infos
        host = reachable_host(self._settings.coordinator.host)
        http_port, grpc_port = (int(str(infos[COORDINATOR][key])) for key in ("http_port", "grpc_port"))
        plans = plan_workers(self._settings, self._machine, f"{host}:{grpc_port}")
        for plan in plans:
            self._spawn(plan)
        infos = self._await_started({plan.name for plan in plans})
        if isinstance(infos, int):
            return infos
        self._on_ready(RunningFleet(host, http_port, grpc_port, tuple((plan, infos[plan.name]) for plan in plans)))
        return self._watch()

    def _spawn(self, plan: ChildPlan) -> None:
        self._children[plan.name] = ChildProcess(plan, self._events.put, self._command)

    def _request_stop(self) -> None:
        self._events.put(StopRequested(time.monotonic()))

    def _await_started(self, names: set[str]) -> dict[str, dict[str, object]] | int:
        """What each of `names` reported; or, if it does not come to that, the exit code."""
        infos: dict[str, dict[str, object]] = {}
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while infos.keys() != names:
            match self._next_event(deadline_s):
                case Started(name, info):
                    infos[name] = info
                case Exited(name, code):
                    _log.error("%s ended during start-up (%s); its log is above", name, describe_exit(code))
                    return 1
                case StopRequested():
                    return 0
                case None:
                    waiting = ", ".join(sorted(names - infos.keys()))
                    _log.error("not ready after %.0f s: %s", START_TIMEOUT_S, waiting)
                    return 1
        return infos

    def _watch(self) -> int:
        while True:
            match self._next_event():
                case Exited(name, code) if name == COORDINATOR:
                    _log.error("the coordinator ended unexpectedly (%s): stopping the fleet", describe_exit(code))
                    return 1
                case Exited(name, code):
                    level = logging.INFO if code == 0 else logging.ERROR
                    _log.log(level, "%s ended (%s); the fleet goes on without it", name, describe_exit(code))
                case StopRequested():
                    return 0
                case Started() | None:
                    pass

    def _next_event(self, deadline_s: float | None = None) -> Event | None:
        """The next event, with exits already noted; None once the deadline has passed."""
        try:
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(event, Exited):
            self._children.pop(event.name, None)
        return event

    def _stop(self) -> bool:
        """End the coordinator, which drains while the workers still work, then them; whether nobody must be killed."""
        begun_s = time.monotonic()
        coordinator = [name for name in self._children if name == COORDINATOR]
        if not self._end(coordinator, self._settings.coordinator.drain_s + GRACE_S, begun_s):
            return False
        return self._end(list(self._children), self._settings.worker.drain_s + GRACE_S, begun_s)

    def _end(self, names: Sequence[str], grace_s: float, begun_s: float) -> bool:
        for name in names:
            self._children[name].terminate()
        deadline_s = time.monotonic() + grace_s
        while not self._children.keys().isdisjoint(names):
            match self._next_event(deadline_s):
                case StopRequested(at_s) if at_s - begun_s > INSISTENCE_S:
                    _log.warning("asked again to stop: ending at once")
                    return False
                case None:
                    left = ", ".join(name for name in names if name in self._children)
                    _log.error("still running after %.0f s, killing: %s", grace_s, left)
                    return False
                case Exited(name, code) if code not in {0, -signal.SIGTERM}:
                    _log.warning("%s did not end cleanly (%s)", name, describe_exit(code))
                case _:
                    pass
        return True

    def _kill_rest(self) -> None:
        for child in self._children.values():
            child.kill()
        deadline_s = time.monotonic() + KILL_TIMEOUT_S
        while self._children and time.monotonic() < deadline_s:
            self._next_event(deadline_s)


def reachable_host(host: str) -> str:
    """An address that processes on this machine can dial, for one to listen on; IPv6 in brackets."""
    dialled = {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{dialled}]" if ":" in dialled and not dialled.startswith("[") else dialled


def describe_exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


@contextmanager
def _stop_signals(request_stop: Callable[[], None]) -> Generator[None]:
    """Turn stop signals into calls of `request_stop` for the duration."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        request_stop()

    previous = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
