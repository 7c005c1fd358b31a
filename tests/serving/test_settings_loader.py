"""Settings by precedence, and every refusal by name."""

import tomllib
from pathlib import Path

import pytest

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.serving.settings import Settings
from pdserve.serving.settings_loader import load_settings


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


@pytest.mark.parametrize("section", ["model", "worker"])
def test_a_section_written_as_a_list_of_tables_is_told_how_to_write_it(tmp_path: Path, section: str) -> None:
    message = _refusal({}, _config(tmp_path, f"[[{section}]]\n"))
    assert message.startswith(f"[[{section}]] (")
    assert f"write [{section}]" in message
    assert ("further models are [[more_models]]" in message) is (section == "model")


def test_a_section_that_is_no_table_is_refused(tmp_path: Path) -> None:
    assert _refusal({}, _config(tmp_path, "worker = 5\n")).startswith("unknown setting worker (")


def test_api_keys_never_show_in_a_refusal(tmp_path: Path) -> None:
    message = _refusal({}, _config(tmp_path, "[coordinator.api_keys]\nsk-secret = 7\n"))
    assert message.startswith("coordinator.api_keys (")
    assert "secret" not in message


MORE = '[{"source": "a/one.gguf"}, {"source": "two", "dtype": "float32"}]'


def test_further_models_come_from_every_source(tmp_path: Path) -> None:
    tables = '[model]\nsource = "zero"\n[[more_models]]\nsource = "one"\nserved_name = "uno"\n'
    config = _config(tmp_path, tables + '[[more_models]]\nsource = "two"\ndtype = "float32"\n')
    settings = load_settings({}, config, {})
    assert [model.name for model in settings.models] == ["zero", "uno", "two"]
    assert [model.dtype for model in settings.models] == ["bfloat16", "bfloat16", "float32"]
    assert [model.name for model in load_settings({}, config, {"PDSERVE_MORE_MODELS": MORE}).models] == [
        "zero",
        "one.gguf",
        "two",
    ]
    assert load_settings({"more_models": ()}, config, {"PDSERVE_MORE_MODELS": MORE}).models == (settings.model,)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"source": "a"}, {"source": "b", "dtype": "float16"}]', "1.dtype: should be 'bfloat16' or 'float32'"),
        ('[{"sorce": "a"}]', "0.sorce: Extra inputs are not permitted"),
        ("a,b", "0: should be a valid dictionary"),
        ("[{", "not valid JSON"),
    ],
)
def test_what_is_wrong_with_a_further_model_is_named(text: str, problem: str) -> None:
    message = _refusal({}, None, {"PDSERVE_MORE_MODELS": text})
    assert message.startswith("more_models ")
    assert "PDSERVE_MORE_MODELS" in message
    assert problem in message


def test_unreadable_or_broken_files_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    assert _refusal({}, missing) == f"config file {missing}: No such file or directory"
    broken = _config(tmp_path, "[worker\n")
    assert _refusal({}, broken).startswith(f"config file {broken}: ")
    with pytest.raises(tomllib.TOMLDecodeError):
        tomllib.loads(broken.read_text())


def test_settings_survive_json_unchanged() -> None:
    settings = load_settings({"worker.cores": "0,1", "coordinator.api_keys": '{"k": "t"}'}, None, {})
    assert Settings.model_validate_json(settings.model_dump_json()) == settings
