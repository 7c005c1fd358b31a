"""Children: what passes between a launcher and one of them, and that they work whatever the parent holds."""

import os
import queue
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pdserve.client.channels import sync_channel, sync_server
from pdserve.launch.child import main as child_main
from pdserve.launch.plan import ChildPlan
from pdserve.launch.process import ChildProcess, Exited, Started, child_command
from pdserve.launch.roles import MODULES
from pdserve.serving.settings import CoordinatorSettings, Settings

RPC_CHILD = str(Path(__file__).with_name("rpc_child.py"))
TIMEOUT_S = 60.0
Events = "queue.SimpleQueue[Started | Exited]"


def _script(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def _start(code: str, settings: Settings | None = None) -> "tuple[ChildProcess, Events]":
    """A child that runs `code`, in which CONTROL and READY are its file descriptors."""
    events: queue.SimpleQueue[Started | Exited] = queue.SimpleQueue()
    plan = ChildPlan("decode", "decode-0", settings or Settings())
    head = "import os, sys, json\n"
    child = ChildProcess(
        plan, events.put, lambda _, control, ready: _script(f"{head}CONTROL, READY = {control}, {ready}\n{code}")
    )
    return child, events


@pytest.fixture
def address() -> Iterator[str]:
    server = sync_server(4)
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(TIMEOUT_S)


def test_children_make_calls_though_the_parent_holds_a_channel(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_ADDRESS", address)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    events: queue.SimpleQueue[Started | Exited] = queue.SimpleQueue()

    def command(role: str, control_fd: int, ready_fd: int) -> list[str]:
        return [sys.executable, RPC_CHILD, role, "--control-fd", str(control_fd), "--ready-fd", str(ready_fd)]

    with sync_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).status == 1
        for batch in range(5):
            for index in range(4):
                ChildProcess(ChildPlan("decode", f"child-{batch}-{index}", Settings()), events.put, command)
            seen = [events.get(timeout=TIMEOUT_S) for _ in range(8)]
            assert sum(isinstance(event, Started) and event.info == {"status": 1} for event in seen) == 4
            assert sum(isinstance(event, Exited) and event.code == 0 for event in seen) == 4
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).status == 1


def test_the_launchers_command_executes_a_fresh_interpreter() -> None:
    assert child_command("decode", 5, 6)[:4] == [sys.executable, "-m", "pdserve.launch.child", "decode"]


def test_children_are_told_apart_by_their_command_lines() -> None:
    _, events = _start("os.write(READY, (json.dumps({'last': sys.argv[-1]}) + '\\n').encode())")
    assert events.get(timeout=TIMEOUT_S) == Started("decode-0", {"last": "--name=decode-0"})
    assert events.get(timeout=TIMEOUT_S) == Exited("decode-0", 0)


def test_settings_larger_than_a_pipe_arrive_whole() -> None:
    keys = {f"key-{index}": "tenant" * 20 for index in range(3000)}
    settings = Settings(coordinator=CoordinatorSettings(api_keys=keys))
    _, events = _start(
        "line = os.fdopen(CONTROL).readline()\nos.write(READY, (json.dumps({'length': len(line)}) + '\\n').encode())",
        settings,
    )
    assert events.get(timeout=TIMEOUT_S) == Started("decode-0", {"length": len(settings.model_dump_json()) + 1})
    assert events.get(timeout=TIMEOUT_S) == Exited("decode-0", 0)


def test_a_child_that_dies_before_reading_is_reported() -> None:
    _, events = _start("sys.exit(4)")
    assert events.get(timeout=TIMEOUT_S) == Exited("decode-0", 4)


def test_a_child_that_reports_nonsense_is_ended() -> None:
    _, events = _start("os.fdopen(CONTROL).readline()\nos.write(READY, b'nonsense\\n')\nimport signal\nsignal.pause()")
    event = events.get(timeout=TIMEOUT_S)
    assert isinstance(event, Exited)
    assert event.code != 0


def test_ending_an_ended_child_is_harmless() -> None:
    child, events = _start("")
    assert events.get(timeout=TIMEOUT_S) == Exited("decode-0", 0)
    child.terminate()
    child.kill()


@pytest.mark.parametrize("role", list(MODULES))
def test_a_refusal_inside_a_service_becomes_a_log_line_and_an_exit_code(
    role: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = (
        "from pdserve.launch.child import main\n"
        "from pdserve.core.errors import invalid\n"
        "def load(role):\n"
        "    def run(settings, ready):\n"
        "        raise invalid('no such thing', 'model')\n"
        "    return run\n"
        f"sys.exit(main(['{role}', '--control-fd', str(CONTROL), '--ready-fd', str(READY)], load) + 40)"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    _, events = _start(code)
    assert events.get(timeout=TIMEOUT_S) == Exited("decode-0", 41)
    assert capfd.readouterr().err.endswith(" pdserve.launch.child: no such thing\n")


def test_a_child_whose_launcher_died_at_once_does_not_start() -> None:
    control, other = os.pipe()
    ready, ready_write = os.pipe()
    os.close(other)

    def load(role: str) -> None:
        raise AssertionError(role)

    try:
        assert child_main(["decode", "--control-fd", str(control), "--ready-fd", str(ready_write)], load) == 1
    finally:
        for fd in (control, ready, ready_write):
            os.close(fd)
