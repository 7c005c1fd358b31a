"""The command line: wrong usage, settings, and what reaches the launcher or a service."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.cli import console
from pdserve.cli.app import app, run
from pdserve.core import model_fetch
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.launch import local, roles
from pdserve.launch.local import RunningFleet
from pdserve.launch.plan import Machine, plan_workers
from pdserve.launch.roles import Ready
from pdserve.serving.settings import Settings

runner = CliRunner()


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.cli.serve.configure_logging", lambda *_: None)
    for variable in [name for name in os.environ if name.startswith("PDSERVE_")]:
        monkeypatch.delenv(variable)


@pytest.fixture
def fleets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Settings]:
    """The settings of each fleet that the command line would have started."""
    started: list[Settings] = []

    class Fake:
        def __init__(self, settings: Settings, _machine: Machine, on_ready: Callable[[RunningFleet], None]) -> None:
            started.append(settings)
            self._on_ready = on_ready

        def run(self) -> int:
            plans = plan_workers(started[-1], Machine((0, 1), 2**33), "127.0.0.1:50123")
            workers = tuple((plan, dict[str, object]()) for plan in plans)
            self._on_ready(RunningFleet("127.0.0.1", 8123, 50123, workers))
            return 0

    monkeypatch.setattr(local, "LocalFleet", Fake)
    monkeypatch.setattr(model_fetch, "resolve_model", lambda *_: tmp_path)
    return started


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Settings]]:
    """(role, settings) of each service that the command line would have run."""
    ran: list[tuple[str, Settings]] = []

    def fake(role: str, settings: Settings, ready: Ready) -> int:
        ran.append((role, settings))
        ready({"worker_id": "w"})
        return 0

    monkeypatch.setattr(roles, "run_service", fake)
    return ran


def _invoke(*arguments: str) -> tuple[int, str, str]:
    result = runner.invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_flags_reach_the_launcher(fleets: list[Settings], tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[worker]\nblock_size = 32\n[launch]\nprefill = 9\n")
    flags = ["--prefill", "2", "--decode", "3", "--dtype", "float32", "--http-port", "0", "--host", "0.0.0.0"]
    code, out, _ = _invoke(
        "serve", *flags, "--config", str(config), "--set", "worker.lease_s=7", "--set", "launch.pin=no"
    )
    assert code == 0
    (settings,) = fleets
    assert (settings.launch.prefill, settings.launch.decode, settings.launch.pin) == (2, 3, False)
    assert (settings.model.dtype, settings.coordinator.http_port, settings.coordinator.host) == (
        "float32",
        0,
        "0.0.0.0",
    )
    assert (settings.worker.block_size, settings.worker.lease_s) == (32, 7.0)
    assert "http://127.0.0.1:8123/v1" in out
    assert "curl -N http://127.0.0.1:8123/v1/completions" in out
    assert '{"model": "smollm2-135m-instruct", "prompt": ' in out
    assert "Authorization" not in out


def test_the_banners_example_carries_a_key_where_one_is_asked_for(fleets: list[Settings]) -> None:
    code, out, _ = _invoke("serve", "--set", 'coordinator.api_keys={"secret": "tenant"}')
    assert code == 0
    assert '-H "Authorization: Bearer $KEY"' in out
    assert "secret" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--set", "nonsense"], "--set nonsense: expected section.field=value"),
        (["serve", "--set", "worker.thread=2"], "unknown setting worker.thread (flag): did you mean worker.threads?"),
        (["serve", "--http-port", "70000"], "coordinator.http_port = 70000 (flag): should be less than or equal"),
        (["serve", "--prefill", "0"], "launch.prefill = 0 (flag): should be greater than or equal to 1"),
        (["serve", "--mode", "colocated", "--decode", "2"], "--decode has no effect in colocated mode"),
        (["serve", "--set", "worker.kv_port=7"], "worker.kv_port must be 0 when several workers share a machine"),
        (["serve", "--config", "/nowhere.toml"], "config file /nowhere.toml: No such file or directory"),
        (["serve", "--model", "a/x.gguf", "--model", "x.gguf"], "more_models: a/x.gguf and x.gguf would both be"),
        (["worker", "decode"], "worker.coordinators is empty"),
        (["worker", "decode", "--coordinator", "here"], "worker.coordinators: 'here' is not HOST:PORT"),
    ],
)
def test_wrong_settings_are_one_line_and_exit_code_2(arguments: Sequence[str], message: str) -> None:
    code, out, err = _invoke(*arguments)
    assert code == 2
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert out == ""


def test_several_models_reach_the_launcher_and_the_banner(fleets: list[Settings]) -> None:
    models = ["--model", "/m/ash", "--model", "org/birch", "--model", "elm.gguf"]
    code, out, err = _invoke("serve", *models, "--dtype", "float32", "--set", "model.device=cuda")
    assert code == 0
    (settings,) = fleets
    assert [(m.source, m.dtype, m.device) for m in settings.models] == [
        ("/m/ash", "float32", "cuda"),
        ("org/birch", "float32", "cuda"),
        ("elm.gguf", "float32", "cuda"),
    ]
    assert "1 prefill, 1 decode workers for each of ash, org/birch, elm.gguf" in err
    lines = [line.split() for line in out.splitlines()]
    for name in ("ash", "org/birch", "elm.gguf"):
        assert ["model", name, "(float32,", "cuda)"] in lines
        for role in ("prefill", "decode"):
            assert [f"{name}.{role}-0", "cores", "any"] in lines


def test_models_named_by_flags_replace_those_set_elsewhere(fleets: list[Settings], tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[model]\ndtype = "float32"\n[[more_models]]\nsource = "oak"\n')
    assert _invoke("serve", "--config", str(config))[0] == 0
    assert _invoke("serve", "--config", str(config), "--dtype", "float32", "--device", "cuda:1")[0] == 0
    assert _invoke("serve", "--config", str(config), "--model", "ash")[0] == 0
    assert _invoke("serve", "--config", str(config), "--model", "ash", "--model", "elm")[0] == 0
    assert [[(m.name, m.dtype, m.device) for m in settings.more_models] for settings in fleets] == [
        [("oak", "bfloat16", "cpu")],
        [("oak", "float32", "cuda:1")],
        [],
        [("elm", "float32", "cpu")],
    ]


def test_a_coordinator_serves_every_model_and_a_worker_loads_one(
    services: list[tuple[str, Settings]], tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[[more_models]]\nsource = "oak"\n')
    assert _invoke("coordinator", "--model", "ash", "--model", "elm")[0] == 0
    assert _invoke("worker", "decode", "--coordinator", "a:1", "--model", "oak", "--config", str(config))[0] == 0
    assert [[model.name for model in settings.models] for _, settings in services] == [["ash", "elm"], ["oak"]]


def test_a_worker_joins_every_coordinator_named(services: list[tuple[str, Settings]]) -> None:
    flags = ["--coordinator", "a:1", "--coordinator", "[::1]:2", "--id", "d7", "--advertise-host", "10.0.0.7"]
    assert _invoke("worker", "decode", *flags)[0] == 0
    ((role, settings),) = services
    assert role == "decode"
    assert settings.worker.coordinators == ("a:1", "[::1]:2")
    assert (settings.worker.worker_id, settings.worker.advertise_host) == ("d7", "10.0.0.7")


def test_a_coordinator_takes_its_ports(services: list[tuple[str, Settings]]) -> None:
    assert _invoke("coordinator", "--grpc-port", "7", "--http-port", "0")[0] == 0
    ((role, settings),) = services
    assert (role, settings.coordinator.grpc_port, settings.coordinator.http_port) == ("coordinator", 7, 0)


def test_a_port_that_is_taken_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*_: object) -> int:
        raise OSError("cannot listen on 127.0.0.1:7")

    monkeypatch.setattr(roles, "run_service", taken)
    assert _invoke("coordinator") == (1, "", "error: cannot listen on 127.0.0.1:7\n")


def test_typed_failures_become_a_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> Path:
        raise PdserveError(ErrorReason.MODEL_NOT_FOUND, "no model here")

    monkeypatch.setattr(model_fetch, "resolve_model", refuse)
    monkeypatch.setattr(sys, "argv", ["pdserve", "serve"])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 1
    assert capsys.readouterr().err.endswith("error: no model here\n")


def test_failures_are_explained() -> None:
    assert console.explain(PdserveError(ErrorReason.QUEUE_FULL, "busy", retry_after_s=2)) == (
        "queue_full: busy (retry after 2 s)"
    )


def test_help_loads_neither_grpc_nor_torch() -> None:
    code = (
        "import sys, pdserve.cli.app, pdserve.launch.local as l; print(sorted({'grpc', 'torch'} & sys.modules.keys()))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout == "[]\n"
