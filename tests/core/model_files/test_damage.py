"""Damaged model files open or are refused, and nothing else: no crash, whatever a byte or a value becomes."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_files import open_model_files
from pdserve.core.model_files.architectures import gguf_family
from pdserve.core.model_files.gguf_header import GgufHeader, read_gguf_header
from tests.support.tiny_models import FAMILIES, write_tiny_gguf, write_tiny_llama, write_tiny_packed

TINY = {"num_layers": 1, "hidden_size": 32, "head_dim": 8, "intermediate_size": 32, "context_length": 64}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([10**9, 2**31, 2**63, 10**400, -(10**400)]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(["", "default", "linear", "dynamic", "yarn", "llama3", "sliding_attention", "\0"]),
)
KEYS = st.sampled_from(
    sorted(
        {key for config in FAMILIES.values() for key in config}
        | {"rope_scaling", "rope_parameters", "rope_type", "type", "factor", "original_max_position_embeddings"}
        | {"low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
        | {"attention_factor", "full_attention", "sliding_attention", "partial_rotary_factor", "text_config"}
        | {"layer_types", "tie_word_embeddings", "quantization_config", "dtype"}
    )
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4))
GGUF_KEYS = (
    *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length"),
    *("rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_log_multiplier"),
    *("attention.sliding_window", "attention.sliding_window_pattern", "attention.scale", "rope.freq_base_swa"),
)
PACKED = ("llama", "qwen2", "qwen3", "gemma3")
EDITS = st.dictionaries(KEYS, VALUES, min_size=1, max_size=4)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", **TINY)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("damaged") / "tiny", **TINY)


def opens_or_is_refused(source: Path) -> None:
    with suppress(PdserveError):
        open_model_files(source).stored_tensors()


@settings(max_examples=100, deadline=None)
@given(cut=st.floats(0, 1, exclude_max=True))
def test_gguf_cut_short_is_refused(gguf_file, tmp_path_factory, cut):
    whole = gguf_file.read_bytes()
    path = tmp_path_factory.mktemp("cut") / "tiny.gguf"
    path.write_bytes(whole[: int(len(whole) * cut)])
    with pytest.raises(PdserveError) as caught:
        open_model_files(path)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 2000), byte=st.integers(0, 255))
def test_gguf_with_a_changed_byte_opens_or_is_refused(gguf_file, tmp_path_factory, position, byte):
    damaged = bytearray(gguf_file.read_bytes())
    damaged[position] = byte
    path = tmp_path_factory.mktemp("flipped") / "tiny.gguf"
    path.write_bytes(damaged)
    opens_or_is_refused(path)


@settings(max_examples=300, deadline=None)
@given(family=st.sampled_from(sorted(FAMILIES)), edits=EDITS, dropped=st.lists(KEYS, max_size=2))
def test_any_config_opens_or_is_refused(directory, family, edits, dropped):
    raw = {key: value for key, value in (FAMILIES[family] | edits).items() if key not in dropped}
    (directory / "config.json").write_text(json.dumps(raw))
    opens_or_is_refused(directory)


@pytest.fixture(scope="module")
def headers(tmp_path_factory) -> dict[str, GgufHeader]:
    root = tmp_path_factory.mktemp("headers")
    return {name: read_gguf_header(write_tiny_packed(root / f"{name}.gguf", name)) for name in PACKED}


@settings(max_examples=300, deadline=None)
@given(data=st.data(), name=st.sampled_from(PACKED))
def test_any_gguf_metadata_is_read_or_refused(headers, data, name):
    metadata = headers[name].metadata
    keys = st.sampled_from(sorted(metadata.keys() | {f"{metadata['general.architecture']}.{key}" for key in GGUF_KEYS}))
    edits = data.draw(st.dictionaries(keys, SCALARS | st.lists(SCALARS, max_size=3), min_size=1, max_size=4))
    architecture = str(metadata["general.architecture"])
    tensor_dtypes = data.draw(st.sampled_from([{}, {"rope_freqs.weight": "F32"}]))
    with suppress(PdserveError):
        gguf_family(architecture).from_gguf(metadata | edits, tensor_dtypes)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(["generation_config.json", "tokenizer_config.json", "tokenizer.json"]), value=VALUES)
def test_any_companion_file_opens_or_is_refused(tmp_path_factory, name, value):
    copy = write_tiny_llama(tmp_path_factory.mktemp("companion"), **TINY)
    keys = ("eos_token_id", "eos_token", "added_tokens")
    (copy / name).write_text(json.dumps(dict.fromkeys(keys, value)))
    opens_or_is_refused(copy)


@settings(max_examples=200, deadline=None)
@given(entry=st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), VALUES), whole=VALUES)
def test_any_safetensors_header_opens_or_is_refused(tmp_path_factory, entry, whole):
    source = tmp_path_factory.mktemp("header")
    (source / "config.json").write_text(json.dumps(FAMILIES["llama"]))
    for header in (whole, {"a": whole}, {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | entry}):
        encoded = json.dumps(header).encode()
        (source / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(4))
        opens_or_is_refused(source)


@pytest.mark.parametrize("shards", [1, None, {"a": "\0"}, {"a": ""}, {"a": "."}, {"a": ".."}, {"a": "x/y"}, {"a": [1]}])
def test_an_absurd_index_is_refused(tmp_path, shards):
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"]))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(PdserveError):
        open_model_files(tmp_path).stored_tensors()


def test_json_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(PdserveError, match=r"config\.json"):
        open_model_files(tmp_path)
