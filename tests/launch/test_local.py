"""The life of a local fleet with real processes: start, stop, deaths, and a launcher that is killed."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve.launch.local import describe_exit, reachable_host

RUN_FLEET = str(Path(__file__).with_name("run_fleet.py"))
TIMEOUT_S = 60.0
pytestmark = pytest.mark.timeout(120)


class Fleet:
    """A launcher under test and the pids of everything it started."""

    def __init__(self, process: subprocess.Popen[str], events: Path) -> None:
        self.process = process
        self._events = events
        self.pid_fds: dict[str, int] = {}

    def ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        report: dict[str, Any] = json.loads(self.process.stdout.readline())
        self.note_children()
        return report

    def note_children(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.process.pid).children()
        for child in children:
            self.pid_fds.setdefault(str(child.pid), os.pidfd_open(child.pid))
        return children

    def wait(self) -> int:
        code = self.process.wait(TIMEOUT_S)
        return code

    def all_gone(self) -> bool:
        """Wait until every child has ended; False after a long time."""
        return all(select.select([fd], [], [], TIMEOUT_S)[0] for fd in self.pid_fds.values())

    def events(self) -> list[str]:
        return self._events.read_text().splitlines() if self._events.exists() else []

    def stderr(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()


@contextmanager
def _launched(folder: Path, settings: dict[str, Any], behaviours: dict[str, str] | None = None) -> Iterator[Fleet]:
    events = folder / "events"
    environment = {
        **os.environ,
        "FAKE_BEHAVIOURS": json.dumps(behaviours or {}),
        "FAKE_EVENTS": str(events),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, RUN_FLEET, json.dumps(settings)]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    fleet = Fleet(process, events)
    with process:
        try:
            yield fleet
        finally:
            process.kill()
            for pid_fd in fleet.pid_fds.values():
                with_exit = select.select([pid_fd], [], [], 0)[0]
                if not with_exit:
                    signal.pidfd_send_signal(pid_fd, signal.SIGKILL)
                os.close(pid_fd)


def test_a_fleet_starts_serves_and_stops_in_order(tmp_path: Path) -> None:
    with _launched(tmp_path, {"coordinator": {"grpc_port": 0, "max_choices": 3}}) as fleet:
        report = fleet.ready()
        assert [worker["name"] for worker in report["workers"]] == ["prefill-0", "decode-0"]
        assert report["grpc_port"] == 2
        for worker in report["workers"]:
            assert worker["settings"]["worker"]["coordinators"] == ["127.0.0.1:2"]
            assert worker["settings"]["coordinator"]["max_choices"] == 3
            assert worker["session"] == worker["pid"]
        fleet.process.send_signal(signal.SIGTERM)
        assert fleet.wait() == 0
        assert fleet.all_gone()
        assert fleet.events()[0] == "stopped coordinator"
        assert sorted(fleet.events()[1:]) == ["stopped decode-0", "stopped prefill-0"]


def test_children_are_pinned_as_planned(tmp_path: Path) -> None:
    with _launched(tmp_path, {}) as fleet:
        for worker in fleet.ready()["workers"]:
            cores = worker["settings"]["worker"]["cores"]
            assert cores
            assert worker["affinity"] == sorted(cores)
            assert worker["omp"] == str(len(cores)) == "1"


def test_the_launcher_never_loads_grpc_or_torch(tmp_path: Path) -> None:
    with _launched(tmp_path, {}) as fleet:
        assert fleet.ready()["loaded"] == []
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.wait() == 0
        assert fleet.process.stdout is not None
        assert json.loads(fleet.process.stdout.readline())["loaded"] == []


def test_a_signal_during_start_up_stops_what_was_started(tmp_path: Path) -> None:
    with _launched(tmp_path, {}, {"decode-0": "never ready"}) as fleet:
        assert fleet.process.stderr is not None
        while len(fleet.note_children()) < 3:
            select.select([fleet.process.stderr], [], [], 0.02)
        fleet.process.send_signal(signal.SIGTERM)
        assert fleet.wait() == 0
        assert fleet.all_gone()


@pytest.mark.parametrize("name", ["coordinator", "decode-0"])
def test_a_death_during_start_up_ends_the_fleet(tmp_path: Path, name: str) -> None:
    with _launched(tmp_path, {}, {name: "fail"}) as fleet:
        assert fleet.wait() == 1
        assert f"{name} ended during start-up (exit code 3)" in fleet.stderr()
        assert ("stopped coordinator" in fleet.events()) == (name != "coordinator")


def test_a_worker_that_dies_later_leaves_the_fleet_serving(tmp_path: Path) -> None:
    with _launched(tmp_path, {"launch": {"decode": 2}}) as fleet:
        workers = {worker["name"]: worker["pid"] for worker in fleet.ready()["workers"]}
        os.kill(workers["decode-1"], signal.SIGUSR1)
        assert fleet.process.stderr is not None
        news = "decode-1 ended (exit code 5); the fleet goes on without it"
        assert any(news in line for line in fleet.process.stderr)
        assert fleet.process.poll() is None
        fleet.process.send_signal(signal.SIGTERM)
        assert fleet.wait() == 0
        assert fleet.all_gone()
        assert "stopped decode-0" in fleet.events()


def test_the_coordinators_death_ends_the_fleet(tmp_path: Path) -> None:
    with _launched(tmp_path, {}) as fleet:
        workers = {worker["pid"] for worker in fleet.ready()["workers"]}
        (coordinator,) = {child.pid for child in fleet.note_children()} - workers
        os.kill(coordinator, signal.SIGUSR1)
        assert fleet.wait() == 1
        assert fleet.all_gone()
        assert sorted(fleet.events()) == ["stopped decode-0", "stopped prefill-0"]


def test_a_child_that_will_not_end_is_killed_after_its_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _launched(tmp_path, {"worker": {"drain_s": 0.1}}, {"prefill-0": "stubborn"}) as fleet:
        fleet.ready()
        fleet.process.send_signal(signal.SIGTERM)
        assert fleet.wait() == 1
        assert fleet.all_gone()
        assert "killing: prefill-0" in fleet.stderr()


def test_children_end_by_themselves_when_the_launcher_is_killed(tmp_path: Path) -> None:
    with _launched(tmp_path, {}) as fleet:
        fleet.ready()
        assert len(fleet.pid_fds) == 3
        fleet.process.kill()
        fleet.process.wait(TIMEOUT_S)
        assert fleet.all_gone()
        assert sorted(fleet.events()) == ["stopped coordinator", "stopped decode-0", "stopped prefill-0"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("[::1]", "[::1]"), ("10.0.0.1", "10.0.0.1")],
)
def test_hosts_to_dial(host: str, expected: str) -> None:
    assert reachable_host(host) == expected


def test_exits_are_described() -> None:
    assert (describe_exit(3), describe_exit(-9)) == ("exit code 3", "signal 9")
