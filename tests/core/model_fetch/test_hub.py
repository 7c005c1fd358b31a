"""Models from a hub: whole or not at all, used from the cache without a network, refused by name."""

import threading
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_fetch import resolve_model
from pdserve.core.model_fetch.hub import HubName, parse_hub_name
from tests.support.hub_server import Hub, serving

REPO = "acme/tiny-1.5B"
FILES = {
    "config.json": b"{}",
    "generation_config.json": b'{"eos_token_id": 1}',
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b'{"bos_token": "<s>"}',
    "chat_template.jinja": b"T",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "model-00001-of-00002.safetensors": b"one" * 1000,
    "model-00002-of-00002.safetensors": b"two" * 1000,
}
UNWANTED = {
    "README.md": b"#",
    "consolidated.safetensors": b"x",
    "original/model.safetensors": b"x",
    "pytorch_model.bin": b"x",
    "tiny-q4.gguf": b"GGUF4",
    "big/tiny-q8.gguf": b"GGUF8",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Generator[Hub]:
    with serving(Hub(REPO, FILES | UNWANTED)) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.endpoint)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield served


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Hub(REPO, FILES)) as gone:
        pass
    monkeypatch.setenv("HF_ENDPOINT", gone.endpoint)


def refused(source: str, cache: Path) -> str:
    with pytest.raises(PdserveError) as caught:
        resolve_model(source, cache)
    assert caught.value.reason is ErrorReason.MODEL_NOT_FOUND
    return caught.value.message


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_whole_model_is_what_serving_needs_of_it(hub: Hub, tmp_path: Path) -> None:
    path = resolve_model(REPO, tmp_path)
    assert content(path) == FILES
    assert path.is_relative_to(tmp_path / "hub")


def test_a_cached_model_needs_no_network(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_model(REPO, tmp_path)
    hub.requests.clear()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model(REPO, tmp_path) == path
    assert hub.requests == []


def test_one_gguf_file(hub: Hub, tmp_path: Path) -> None:
    path = resolve_model(f"{REPO}/tiny-q4.gguf", tmp_path)
    assert path.read_bytes() == b"GGUF4"
    assert content(path.parent) == {"tiny-q4.gguf": b"GGUF4"}
    assert resolve_model(f"{REPO}@v1/big/tiny-q8.gguf", tmp_path).read_bytes() == b"GGUF8"
    assert resolve_model(f"{REPO}/tiny-q4.gguf", tmp_path) == path


def test_a_path_that_exists_goes_before_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(REPO).mkdir(parents=True)
    assert resolve_model(REPO, tmp_path) == Path(REPO)
    assert hub.requests == []


def test_refresh_takes_newer_files_and_others_keep_theirs(hub: Hub, tmp_path: Path) -> None:
    old = resolve_model(REPO, tmp_path)
    hub.files = FILES | {"config.json": b'{"new": 1}'}
    assert resolve_model(REPO, tmp_path) == old
    new = resolve_model(REPO, tmp_path, refresh=True)
    assert (new / "config.json").read_bytes() == b'{"new": 1}'
    assert resolve_model(REPO, tmp_path) == new


@pytest.mark.usefixtures("no_hub")
def test_without_a_network_and_a_copy(tmp_path: Path) -> None:
    message = refused(REPO, tmp_path)
    assert REPO in message
    assert "HF_ENDPOINT" in message
    assert "cache" in message


def test_refresh_without_a_network_keeps_the_copy(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = resolve_model(REPO, tmp_path)
    capfd.readouterr()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model(REPO, tmp_path, refresh=True) == path
    out, err = capfd.readouterr()
    assert (out, "using the copy in the cache" in err) == ("", True)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("acme/nothing", "HF_TOKEN is not set"),
        (f"{REPO}@v9", "no revision 'v9'"),
        (f"{REPO}/tiny-q5.gguf", "tiny-q4.gguf"),
        (f"{REPO}/sub/../tiny-q4.gguf", "neither a path"),
        ("a/b/c", "neither a path"),
        ("acme/", "ORG/NAME"),
    ],
)
def test_what_the_hub_does_not_have(hub: Hub, tmp_path: Path, source: str, named: str) -> None:
    assert named in refused(source, tmp_path)


def test_a_gated_model_says_how_to_get_in(hub: Hub, tmp_path: Path) -> None:
    hub.gated = True
    message = refused(REPO, tmp_path)
    assert "gated" in message
    assert "HF_TOKEN" in message


def test_models_of_other_formats_name_what_there_is(hub: Hub, tmp_path: Path) -> None:
    hub.files = UNWANTED
    assert f"{REPO}/tiny-q4.gguf" in refused(REPO, tmp_path)
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    assert "safetensors" in refused(REPO, tmp_path)


def test_a_download_cut_short_is_never_taken_for_whole(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.lost = frozenset({"model-00002-of-00002.safetensors"})
    refused(REPO, tmp_path)
    hub.lost = frozenset()
    endpoint = hub.endpoint
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    refused(REPO, tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert content(resolve_model(REPO, tmp_path)) == FILES


def test_a_copy_that_lost_a_file_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    path = resolve_model(REPO, tmp_path)
    (path / "model-00001-of-00002.safetensors").unlink()
    assert content(resolve_model(REPO, tmp_path)) == FILES


def test_several_at_once_download_once(hub: Hub, tmp_path: Path) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(resolve_model(REPO, tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(set(paths)) == 1
    assert len(paths) == 4
    fetched = [request for request in hub.requests if request.startswith("GET") and "/resolve/" in request]
    assert len(fetched) == len(FILES)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("a/b", HubName("a/b")),
        ("Qwen/Qwen2.5-0.5B@main", HubName("Qwen/Qwen2.5-0.5B")),
        ("a/b@refs/pr/3", HubName("a/b", "refs/pr/3")),
        ("a/b@v1.0/x.gguf", HubName("a/b", "v1.0", "x.gguf")),
        ("a/b/c/d.gguf", HubName("a/b", "main", "c/d.gguf")),
        ("a", None),
        ("/a/b", None),
        ("./a/b", None),
        ("a/b/c", None),
        ("a/b@", None),
        ("a/b@v1/../x.gguf", None),
        ("", None),
    ],
)
def test_names(source: str, name: HubName | None) -> None:
    assert parse_hub_name(source) == name


@given(st.text())
def test_any_name_is_a_hub_name_or_none(source: str) -> None:
    name = parse_hub_name(source)
    assert name is None or parse_hub_name(str(name)) == name
