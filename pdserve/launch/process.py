"""One child process as the launcher sees it: started with its settings, watched by a thread, ended by pid.

Children are executed afresh, never forked from a process that holds channels or a device, and each leads a session of
its own, so that a terminal's Ctrl-C reaches only the launcher.
"""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.launch.plan import ChildPlan

_log = logging.getLogger(__name__)

CommandBuilder = Callable[[str, int, int], list[str]]
"""(role, control fd, ready fd) → the command to execute."""


@dataclass(frozen=True, slots=True)
class Started:
    """The child serves; `info` is what its service reported."""

    name: str
    info: dict[str, object]


@dataclass(frozen=True, slots=True)
class Exited:
    """The child is gone; `code` is negative for a signal."""

    name: str
    code: int


def child_command(role: str, control_fd: int, ready_fd: int) -> list[str]:
    fds = ["--control-fd", str(control_fd), "--ready-fd", str(ready_fd)]
    return [sys.executable, "-m", "pdserve.launch.child", role, *fds]


class ChildProcess:
    """A running child. `publish` gets Started at most once and Exited exactly once, on a thread of its own."""

    def __init__(self, plan: ChildPlan, publish: Callable[[Started | Exited], None], command: CommandBuilder) -> None:
        self.name = plan.name
        self.role = plan.role
        control_read, self._control = os.pipe()
        self._ready, ready_write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command(plan.role, control_read, ready_write), f"--name={plan.name}"],
                pass_fds=(control_read, ready_write),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **plan.environment},
            )
        finally:
            os.close(control_read)
            os.close(ready_write)
        line = plan.settings.model_dump_json().encode() + b"\n"
        threading.Thread(target=self._watch, args=(line, publish), name=f"watch-{self.name}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        """Ask it to drain and end; harmless once it has ended."""
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def _watch(self, settings_line: bytes, publish: Callable[[Started | Exited], None]) -> None:
        try:
            self._hand_over(settings_line)
            with os.fdopen(self._ready, encoding="utf-8") as pipe:
                line = pipe.readline()
            if line.endswith("\n"):
                publish(Started(self.name, json.loads(line)))
        except ValueError:
            _log.error("%s reported something other than JSON: ending it", self.name)
            self.kill()
        code = self._process.wait()
        os.close(self._control)
        publish(Exited(self.name, code))

    def _hand_over(self, line: bytes) -> None:
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._control, view) :]
        except BrokenPipeError:
            _log.debug("%s ended before it took its settings", self.name)
