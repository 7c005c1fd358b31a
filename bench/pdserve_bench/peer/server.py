"""A server to be compared: started from a command or found by its URL, frozen while the other is measured.

Freezing stops the process and all its children with SIGSTOP: an idle server may spin, and would be measured as noise.
"""

import asyncio
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from pdserve_bench.foreign_cpu import cpu_seconds_of
from pdserve_bench.peer.client import Endpoint, ServerError, complete, get_json

START_TIMEOUT_S = 900.0
THAW_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
WAKE_TIMEOUT_S = 60.0
POLL_S = 0.5
WAKE_PROMPT = range(200, 232)

T = TypeVar("T")


class Gone(Exception):
    """A server that was started here ended by itself."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How to come by one server: by the command line that starts it; or, where that is empty, by `pid`, the process
    above all others of a server that runs already. `cores`: a started one and its children keep to them; empty: to the
    caller's."""

    name: str
    command: str
    base_url: str
    pid: int = 0
    cores: tuple[int, ...] = ()


class Server:
    """One server that answers. Frozen and thawed from outside; nothing but its API is known of it."""

    def __init__(self, spec: ServerSpec, pid: int, endpoint: Endpoint) -> None:
        self.spec = spec
        self.endpoint = endpoint
        self._pid = pid

    def freeze(self) -> None:
        _signal_tree(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it run again, and wait until it serves: it may find that its parts have missed heartbeats meanwhile."""
        _signal_tree(self._pid, signal.SIGCONT)
        _until(lambda: wake(self.endpoint), THAW_TIMEOUT_S)

    def cpu_s(self) -> float:
        """CPU seconds of its processes so far."""
        return cpu_seconds_of([process.pid for process in self.processes()])

    def processes(self) -> list[psutil.Process]:
        """Those there are now, the one above all others first.

        Raises:
            ServerError: it is gone.
        """
        return _tree(self._pid)

    def describe(self) -> dict[str, object]:
        """For the record: how it was started, what it says it is, and which cores its processes may use."""
        cores = sorted({core for process in self.processes() for core in process.cpu_affinity()})
        shown = {"command": self.spec.command, "base_url": self.spec.base_url, "model": self.endpoint.model}
        return {**shown, "version": _version(self.spec.base_url), "cores": cores}


@contextmanager
def running(spec: ServerSpec, log: Path) -> Generator[Server]:
    """The server, answering; one that was started here writes to `log` and is ended with its children.

    Raises:
        Gone: it ended before it served.
        ServerError: it does not serve after a long time.
    """
    if not spec.command:
        yield Server(spec, spec.pid, _answering(spec, lambda: None))
        return
    with log.open("wb") as output, pinned(spec.cores):
        process = subprocess.Popen(
            shlex.split(spec.command), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )

    def check() -> None:
        if process.poll() is not None:
            raise Gone(f"{spec.name} ended with exit code {process.returncode}: see {log}")

    try:
        yield Server(spec, process.pid, _answering(spec, check))
    finally:
        _end(process)


@contextmanager
def pinned(cores: Collection[int]) -> Generator[None]:
    """This thread, and what it starts meanwhile, keeps to `cores`; empty: nothing changes.

    Raises:
        ValueError: one of them is not on this machine.
    """
    before = os.sched_getaffinity(0)
    try:
        with suppress(OSError):  # the system drops cores it lacks, and objects only where none is left
            os.sched_setaffinity(0, cores or before)
        if missing := set(cores) - os.sched_getaffinity(0):
            raise ValueError(f"not on this machine, or not for us: cores {', '.join(map(str, sorted(missing)))}")
        yield
    finally:
        os.sched_setaffinity(0, before)


def wake(endpoint: Endpoint) -> None:
    asyncio.run(complete(endpoint, WAKE_PROMPT, 8, WAKE_TIMEOUT_S))


def _answering(spec: ServerSpec, check: Callable[[], None]) -> Endpoint:
    """Wait for the first answers; `check` ends the wait for one that is gone."""

    def ask() -> Endpoint:
        check()
        models = asyncio.run(get_json(spec.base_url + "/v1/models"))
        endpoint = Endpoint(spec.base_url, str(models["data"][0]["id"]))
        wake(endpoint)
        return endpoint

    return _until(ask, START_TIMEOUT_S)


def _until(attempt: Callable[[], T], timeout_s: float) -> T:
    """The first result that is not a ServerError; the last of them once the time is over."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return attempt()
        except ServerError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(POLL_S)


def _version(base_url: str) -> str | None:
    """vLLM's way to tell it; None for a server that has no such page."""
    try:
        return str(asyncio.run(get_json(base_url + "/version"))["version"])
    except ServerError:
        return None


def _tree(pid: int) -> list[psutil.Process]:
    """The process and all below it.

    Raises:
        ServerError: it is gone.
    """
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        raise ServerError(f"process {pid} is gone") from None


def _signal_tree(pid: int, number: signal.Signals) -> None:
    for process in _tree(pid):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask it to end; after a while kill what is left of it and of its children."""
    if process.poll() is not None:
        return
    tree = _tree(process.pid)
    _signal_tree(process.pid, signal.SIGCONT)
    process.terminate()
    _, left = psutil.wait_procs(tree, STOP_TIMEOUT_S)
    for one in left:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
