"""Settings that contradict each other, each named."""

import pytest

from pdserve.core.errors import PdserveError
from pdserve.serving.settings import ModelSettings, Settings
from pdserve.serving.settings_checks import contradictions, is_address
from pdserve.serving.settings_loader import load_settings


def _refusal(flags: dict[str, object]) -> str:
    with pytest.raises(PdserveError) as caught:
        load_settings(flags, None, {})
    return caught.value.message


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({"coordinator.heartbeat_s": 10, "worker.lease_s": 5}, ("coordinator.heartbeat_s", "worker.lease_s")),
        ({"coordinator.report_interval_s": 20}, ("coordinator.report_interval_s", "coordinator.stalled_after_s")),
        ({"coordinator.max_deadline_s": 5}, ("coordinator.default_deadline_s", "coordinator.max_deadline_s")),
        ({"coordinator.http_port": 50051}, ("coordinator.http_port", "coordinator.grpc_port")),
        ({"worker.kv_port": 9, "worker.control_port": 9}, ("worker.control_port", "worker.kv_port")),
        ({"coordinator.api_keys": '{"": "tenant"}'}, ("coordinator.api_keys",)),
        ({"coordinator.api_keys": '{"key": " "}'}, ("coordinator.api_keys",)),
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


def test_a_wildcard_address_needs_one_that_others_can_dial() -> None:
    with pytest.raises(PdserveError, match=r"worker\.host is 0\.0\.0\.0"):
        load_settings({"worker.host": "0.0.0.0"}, None, {})
    settings = load_settings({"worker.host": "0.0.0.0", "worker.advertise_host": "10.0.0.2"}, None, {})
    assert settings.worker.advertise_host == "10.0.0.2"


@pytest.mark.parametrize(
    ("sources", "name"),
    [
        (("/one/model.gguf", "/two/model.gguf"), "model.gguf"),
        (("org/model", "org/model@v2"), "org/model"),
        (("a", "b", "b"), "b"),
    ],
)
def test_two_models_of_one_name_are_refused_by_name(sources: tuple[str, ...], name: str) -> None:
    first, *more = (ModelSettings(source=source) for source in sources)
    (problem,) = contradictions(Settings(model=first, more_models=tuple(more)))
    assert all(text in problem for text in (*sources, repr(name), "served_name"))
    named = [model.model_copy(update={"served_name": f"model-{i}"}) for i, model in enumerate(more)]
    assert contradictions(Settings(model=first, more_models=tuple(named))) == []
