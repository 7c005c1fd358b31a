"""The child's side of a launch: settings in, one ready line out, and an end of its own if the launcher dies.

launcher ── control pipe: one JSON line of settings, then silence; its end means the launcher is gone ──► child
launcher ◄── ready pipe: one JSON line, once the service serves ── child
"""

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from pdserve.core.errors import PdserveError
from pdserve.launch.roles import COORDINATOR, MODULES, Ready, RunService, load_service, run_service
from pdserve.serving.logs import configure_logging
from pdserve.serving.settings import Settings

GRACE_S = 10.0
"""Beyond the drain, before an orphan ends itself the hard way."""

_log = logging.getLogger("pdserve.launch.child")


def main(argv: Sequence[str] | None = None, load: Callable[[str], RunService] = load_service) -> int:
    """Run one role as a child of the launcher; the exit code."""
    parser = argparse.ArgumentParser(prog="pdserve.launch.child")
    parser.add_argument("role", choices=tuple(MODULES))
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--name", help="tells children apart in a list of processes")
    arguments = parser.parse_args(argv)
    for fd in (arguments.control_fd, arguments.ready_fd):
        os.set_inheritable(fd, False)
    line = _read_line(arguments.control_fd)
    if not line:
        return 1
    settings = Settings.model_validate_json(line)
    name = COORDINATOR if arguments.role == COORDINATOR else settings.worker.worker_id
    configure_logging(settings.log_level, arguments.role, name)
    _end_with_launcher(arguments.control_fd, max(settings.coordinator.drain_s, settings.worker.drain_s) + GRACE_S)
    try:
        return run_service(arguments.role, settings, _reporter(arguments.ready_fd), load)
    except (PdserveError, OSError) as error:
        _log.error("%s", error.message if isinstance(error, PdserveError) else error)
        return 1


def _reporter(ready_fd: int) -> Ready:
    def ready(info: dict[str, object]) -> None:
        with os.fdopen(ready_fd, "w", encoding="utf-8") as pipe:
            pipe.write(json.dumps(info) + "\n")

    return ready


def _read_line(fd: int) -> bytes:
    """Up to the line's end, unbuffered; empty if the pipe ended first."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(fd, 65536)
        if not data:
            return b""
        line += data
    return bytes(line)


def _end_with_launcher(control_fd: int, grace_s: float) -> None:
    """Ask this process to stop when the pipe ends, and end it after `grace_s` if it has not."""

    def watch() -> None:
        while os.read(control_fd, 4096):
            pass
        _log.warning("the launcher is gone: stopping")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
