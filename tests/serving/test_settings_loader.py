"""Settings by precedence, and every refusal by name."""

import tomllib
from pathlib import Path

import pytest

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.serving.settings import Settings
from pdserve.serving.settings_loader import contradictions, is_address, load_settings


def _config(folder: Path, text: str) -> Path:
    path = folder / "pdserve.toml"
    path.write_text(text)
    return path


def _refusal(flags: dict[str, object], config: Path | None = None, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(PdserveError) as caught:
        load_settings(flags, config, environ or {})
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    return caught.value.message


def test_nothing_given_yields_the_defaults() -> None:
    assert load_settings({}, None, {"HOME": "/nowhere"}) == Settings()


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    config = _config(tmp_path, "[coordinator]\nhttp_port = 1\ngrpc_port = 2\nmax_choices = 3\n[worker]\nthreads = 7\n")
    environ = {"PDSERVE_COORDINATOR__HTTP_PORT": "11", "PDSERVE_COORDINATOR__GRPC_PORT": "12"}
    settings = load_settings({"coordinator.http_port": "21", "worker.block_size": None}, config, environ)
    assert settings.coordinator.http_port == 21
    assert settings.coordinator.grpc_port == 12
    assert settings.coordinator.max_choices == 3
    assert settings.worker.threads == 7
    assert settings.worker.block_size == 16


def test_top_level_names_come_from_every_source(tmp_path: Path) -> None:
    config = _config(tmp_path, 'log_level = "error"\ncache_dir = "/tmp/a"\n')
    settings = load_settings({}, config, {"PDSERVE_LOG_LEVEL": "debug"})
    assert (settings.log_level, settings.cache_dir) == ("debug", Path("/tmp/a"))
    assert load_settings({}, config, {"PDSERVE_CACHE_DIR": "/tmp/b"}).cache_dir == Path("/tmp/b")


def test_lists_and_tables_are_decoded_from_text() -> None:
    environ = {
        "PDSERVE_WORKER__COORDINATORS": "a:1, [::1]:2",
        "PDSERVE_WORKER__CORES": "[0, 1]",
        "PDSERVE_COORDINATOR__API_KEYS": '{"key": "tenant"}',
    }
    settings = load_settings({"transfer.transports": "grpc"}, None, environ)
    assert settings.worker.coordinators == ("a:1", "[::1]:2")
    assert settings.worker.cores == (0, 1)
    assert settings.coordinator.api_keys == {"key": "tenant"}
    assert settings.transfer.transports == ("grpc",)


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        (
            {"coordinator.http_prot": "1"},
            {},
            "unknown setting coordinator.http_prot (flag): did you mean coordinator.http_port?",
        ),
        ({"coordinator": "1"}, {}, "unknown setting coordinator (flag)"),
        ({}, {"PDSERVE_DECODE_WORKERS": "3"}, "unknown setting decode_workers (PDSERVE_DECODE_WORKERS)"),
        ({"coordinator.http_port": 70000}, {}, "coordinator.http_port = 70000 (flag): should be less than or equal"),
        ({}, {"PDSERVE_WORKER__THREADS": "many"}, "worker.threads = 'many' (PDSERVE_WORKER__THREADS): should be a"),
        ({"prefill.token_budget": "0"}, {}, "prefill.token_budget = '0' (flag): should be greater than"),
        ({"model.dtype": "float16"}, {}, "model.dtype = 'float16' (flag): should be 'bfloat16' or 'float32'"),
        ({"model.device": "tpu"}, {}, "model.device = 'tpu' (flag): String should match pattern"),
        ({"coordinator.drain_s": "nan"}, {}, "coordinator.drain_s = 'nan' (flag): should be"),
        ({}, {"PDSERVE_COORDINATOR__API_KEYS": "{"}, "coordinator.api_keys (PDSERVE_COORDINATOR__API_KEYS): not valid"),
    ],
)
def test_refusals_name_the_setting_and_its_origin(
    flags: dict[str, object], environ: dict[str, str], expected: str
) -> None:
    message = _refusal(flags, None, environ)
    assert message.startswith(expected)
    assert "\n" not in message


def test_every_problem_gets_a_line(tmp_path: Path) -> None:
    config = _config(tmp_path, "colour = 1\n[nonsense]\na = 1\n[worker]\nthread = 2\n")
    lines = _refusal({}, config).splitlines()
    assert len(lines) == 3
    assert all(str(config) in line for line in lines)
    assert [line.split()[2] for line in lines] == ["colour", "nonsense", "worker.thread"]


def test_a_section_that_is_no_table_is_refused(tmp_path: Path) -> None:
    assert _refusal({}, _config(tmp_path, "worker = 5\n")).startswith("unknown setting worker (")


def test_api_keys_never_show_in_a_refusal(tmp_path: Path) -> None:
    message = _refusal({}, _config(tmp_path, "[coordinator.api_keys]\nsk-secret = 7\n"))
    assert message.startswith("coordinator.api_keys (")
    assert "secret" not in message


def test_unreadable_or_broken_files_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    assert _refusal({}, missing) == f"config file {missing}: No such file or directory"
    broken = _config(tmp_path, "[worker\n")
    assert _refusal({}, broken).startswith(f"config file {broken}: ")
    with pytest.raises(tomllib.TOMLDecodeError):
        tomllib.loads(broken.read_text())


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({"coordinator.heartbeat_s": 10, "worker.lease_s": 5}, ("coordinator.heartbeat_s", "worker.lease_s")),
        ({"coordinator.report_interval_s": 20}, ("coordinator.report_interval_s", "coordinator.stalled_after_s")),
        ({"coordinator.max_deadline_s": 5}, ("coordinator.default_deadline_s", "coordinator.max_deadline_s")),
        ({"coordinator.http_port": 50051}, ("coordinator.http_port", "coordinator.grpc_port")),
        ({"worker.kv_port": 9, "worker.control_port": 9}, ("worker.control_port", "worker.kv_port")),
        ({"transfer.transports": ""}, ("transfer.transports",)),
        ({"worker.cores": "1,1"}, ("worker.cores",)),
        ({"worker.cores": "-1"}, ("worker.cores",)),
        ({"worker.coordinators": "localhost"}, ("worker.coordinators",)),
    ],
)
def test_contradictions_name_every_setting_involved(flags: dict[str, object], names: tuple[str, ...]) -> None:
    message = _refusal(flags)
    assert all(name in message for name in names)


def test_both_ports_zero_is_fine() -> None:
    settings = load_settings({"coordinator.http_port": 0, "coordinator.grpc_port": 0}, None, {})
    assert contradictions(settings) == []


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("h:1", True),
        ("[::1]:65535", True),
        ("::1:5", False),
        ("h", False),
        (":5", False),
        ("h:0", False),
        ("h:x", False),
    ],
)
def test_addresses(text: str, good: bool) -> None:
    assert is_address(text) is good


def test_settings_survive_json_unchanged() -> None:
    settings = load_settings({"worker.cores": "0,1", "coordinator.api_keys": '{"k": "t"}'}, None, {})
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_a_wildcard_address_needs_one_that_others_can_dial() -> None:
    with pytest.raises(PdserveError, match=r"worker\.host is 0\.0\.0\.0"):
        load_settings({"worker.host": "0.0.0.0"}, None, {})
    settings = load_settings({"worker.host": "0.0.0.0", "worker.advertise_host": "10.0.0.2"}, None, {})
    assert settings.worker.advertise_host == "10.0.0.2"
