"""Fleets under comparison as they run: started, frozen, thawed, their processes told apart. Measures nothing."""

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from pdserve_bench.compare.fleet_specs import FleetSpec, Ports, colocated, disaggregated, free_ports
from pdserve_bench.load.client import LoadClient
from pdserve_bench.load.openai_http import OpenAiClient
from pdserve_bench.load.pdserve_grpc import PdserveClient
from pdserve_bench.peer.server import Server, ServerSpec, running

__all__ = ["Fleet", "FleetSpec", "Ports", "colocated", "disaggregated", "free_ports", "started"]

_NAME_FLAG = "--name="


class Fleet:
    """One that answers, or is frozen."""

    def __init__(self, spec: FleetSpec, server: Server) -> None:
        """`server` answers."""
        self.spec = spec
        self._server = server
        pinning = {name: process.cpu_affinity() for name, process in self._named().items()}
        self._described = {**server.describe(), "protocol": spec.protocol, "pinning": pinning}

    @property
    def model(self) -> str:
        """As clients call it."""
        return self._server.endpoint.model

    @property
    def metrics_url(self) -> str:
        return self.spec.http_url + "/metrics"

    def client(self) -> LoadClient:
        """A new one, to be closed by the caller; call it inside the event loop that uses it."""
        if self.spec.protocol == "grpc":
            return PdserveClient(self.spec.grpc_address)
        return OpenAiClient(self.spec.http_url, self.model, continuous_usage=True)

    def freeze(self) -> None:
        self._server.freeze()

    def thaw(self) -> None:
        """Let it run again, and wait until it has answered a request. Outside any event loop.

        Raises:
            ServerError: it is gone, or does not answer for long.
        """
        self._server.thaw()

    def cpu_s(self) -> float:
        """CPU seconds of its processes so far."""
        return self._server.cpu_s()

    def pids_by_name(self) -> dict[str, int]:
        """Its processes now: ours by role ("decode-0"), others' by the name of their program, all named apart."""
        return {name: process.pid for name, process in self._named().items()}

    def describe(self) -> dict[str, object]:
        """For the record: how it was started, what it said it is, and the cores that each of its processes had then."""
        return dict(self._described)

    def _named(self) -> dict[str, psutil.Process]:
        root, *others = self._server.processes()
        named = {"launcher" if self.spec.grpc_address else "server": root}
        for process in others:
            if not (wanted := _own_name(process)):
                continue
            same = sum(name == wanted or name.startswith(f"{wanted} #") for name in named)
            named[f"{wanted} #{same + 1}" if same else wanted] = process
        return named


def _own_name(process: psutil.Process) -> str:
    """The one that our launcher gave it, or else its program's; "" for one that has just ended."""
    try:
        given = (word.removeprefix(_NAME_FLAG) for word in process.cmdline() if word.startswith(_NAME_FLAG))
        return next(given, "") or str(process.name())
    except psutil.NoSuchProcess:
        return ""


@contextmanager
def started(specs: Iterable[FleetSpec], logs: Path) -> Generator[list[Fleet]]:
    """All of them, each started once the one before it serves and is frozen: all are frozen in the end.

    Each writes to `logs`/NAME.log. Those that were started here are ended with the context; the others are thawed.

    Raises:
        Gone: one ended before it served.
        ServerError: one does not serve after a long time.
        ValueError: there are no such cores.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        fleets: list[Fleet] = []
        for spec in specs:
            own = ServerSpec(spec.name, spec.command, spec.http_url, spec.pid, spec.cores)
            fleet = Fleet(spec, stack.enter_context(running(own, logs / f"{_file_name(spec.name)}.log")))
            if not spec.command:
                stack.callback(fleet.thaw)
            fleet.freeze()
            fleets.append(fleet)
        yield fleets


def _file_name(name: str) -> str:
    return "".join(char if char.isalnum() or char in "-._" else "-" for char in name)
