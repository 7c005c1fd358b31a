"""Configs and tensor directories of both formats, and the refusal by name of what is not implemented."""

import json
from pathlib import Path

import gguf
import pytest

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_files import open_model_files
from pdserve.core.model_files.files import fingerprint
from pdserve.core.tokenizer import load_tokenizer
from tests.support.tiny_models import TinyLlama, write_tiny_gguf, write_tiny_llama

TINY = {"num_layers": 1, "hidden_size": 32, "head_dim": 8, "intermediate_size": 32, "context_length": 64}


@pytest.fixture
def directory(tmp_path):
    return write_tiny_llama(tmp_path / "tiny", **TINY)


def edit(path: Path, **changes: object) -> None:
    """Set keys of a JSON file; None as a string value 'absent' removes one."""
    raw = json.loads(path.read_text()) if path.exists() else {}
    raw.update(changes)
    path.write_text(json.dumps({key: value for key, value in raw.items() if value != "absent"}))


def refusal(source: Path) -> PdserveError:
    with pytest.raises(PdserveError) as caught:
        open_model_files(source).stored_tensors()
    return caught.value


def test_config_of_a_directory(directory):
    config = open_model_files(directory).config
    spec = TinyLlama(**TINY)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.num_layers, config.hidden_size) == (300, 1, 32)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert (config.intermediate_size, config.context_length) == (32, 64)
    assert (config.rms_norm_eps, config.attention[0].rope.theta) == (1e-5, 10000.0)
    assert config.tie_word_embeddings
    assert not config.qkv_bias
    assert {tensor.name for tensor in open_model_files(directory).stored_tensors()} == set(spec.tensors())


def test_config_of_gguf_is_that_of_the_directory(directory, tmp_path):
    packed = open_model_files(write_tiny_gguf(tmp_path / "tiny.gguf", **TINY)).config
    plain = open_model_files(directory).config
    for name in ("architecture", "vocab_size", "head_dim", "num_kv_heads", "tie_word_embeddings", "eos_token_ids"):
        assert getattr(packed, name) == getattr(plain, name)
    assert packed.rms_norm_eps == pytest.approx(1e-5)
    untied = open_model_files(write_tiny_gguf(tmp_path / "untied.gguf", tie=False, **TINY))
    assert not untied.config.tie_word_embeddings


def test_gguf_header_equals_what_the_gguf_package_reads(tmp_path):
    files = open_model_files(write_tiny_gguf(tmp_path / "tiny.gguf", "Q8_0", **TINY))
    reader = gguf.GGUFReader(files.source)
    theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert files.gguf_metadata == theirs
    by_offset = sorted(reader.tensors, key=lambda tensor: tensor.data_offset)
    assert [(t.data_offset, t.n_bytes, t.tensor_type.name) for t in by_offset] == [
        (t.offset, t.num_bytes, t.dtype) for t in files.stored_tensors()
    ]
    assert [t.data.tobytes() for t in by_offset] == [t.map_bytes().tobytes() for t in files.stored_tensors()]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_scaling": {"type": "su"}}, "known: default, dynamic, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "proportional"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters by layer type"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(directory, changes, name):
    edit(directory / "config.json", **changes)
    error = refusal(directory)
    assert error.reason is ErrorReason.UNSUPPORTED
    assert name in error.message


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"hidden_size": "absent"}, "hidden_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_heads"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": 10**400}, "hidden_size"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"max_position_embeddings": -1}, "context_length"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"head_dim": 7}, "head_dim"),
    ],
)
def test_nonsense_in_the_config_is_refused_by_name(directory, changes, name):
    edit(directory / "config.json", **changes)
    error = refusal(directory)
    assert error.reason is ErrorReason.INVALID_ARGUMENT
    assert name in error.message


def test_harmless_spellings_are_accepted(directory):
    edit(
        directory / "config.json",
        rope_scaling=None,
        rope_theta="absent",
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        sliding_window=128,
        use_sliding_window=False,
        num_key_value_heads="absent",
        head_dim="absent",
    )
    config = open_model_files(directory).config
    assert (config.attention[0].rope.theta, config.num_kv_heads, config.head_dim) == (5e5, 4, 8)


def test_tie_flag_in_text_config_only_is_honoured(directory):
    edit(directory / "config.json", tie_word_embeddings="absent", text_config={"tie_word_embeddings": True})
    assert open_model_files(directory).config.tie_word_embeddings
    edit(directory / "config.json", text_config="absent")
    assert not open_model_files(directory).config.tie_word_embeddings


def test_a_directory_that_lacks_a_file_is_refused_with_what_would_do(directory):
    weights = directory / "model.safetensors"
    weights.rename(directory / "pytorch_model.bin")
    with pytest.raises(PdserveError, match="convert them to safetensors"):
        open_model_files(directory).stored_tensors()
    (directory / "pytorch_model.bin").rename(directory / "small.gguf")
    with pytest.raises(PdserveError, match="no weights"):
        open_model_files(directory).stored_tensors()
    (directory / "config.json").unlink()
    assert "small.gguf" in refusal(directory).message


def test_eos_is_the_union_of_all_files(directory):
    """FIELD_CASE L05: config, generation_config (a list) and tokenizer disagree, and each is meant."""
    edit(directory / "config.json", eos_token_id=7)
    edit(directory / "generation_config.json", eos_token_id=[5, 6])
    edit(directory / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert open_model_files(directory).config.eos_token_ids == (0, 5, 6, 7)
    for name in ("generation_config.json", "tokenizer_config.json"):
        (directory / name).unlink()
    assert open_model_files(directory).config.eos_token_ids == (7,)


@pytest.mark.parametrize("name", ["no-such-thing", "model.bin"])
def test_a_source_of_no_known_kind_is_refused(tmp_path, name):
    (tmp_path / "model.bin").write_bytes(b"x")
    assert name in refusal(tmp_path / name).message


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_one_file_of_a_directory_is_answered_with_the_directory(directory, name):
    assert refusal(directory / name).message.endswith(f"pass the directory, {directory}")


def test_a_lora_adapter_is_named_as_one(directory):
    (directory / "config.json").rename(directory / "adapter_config.json")
    assert "a LoRA adapter; merge it into its base model" in refusal(directory).message


def test_the_suffix_of_a_gguf_file_may_be_in_capitals(tmp_path):
    path = write_tiny_gguf(tmp_path / "TINY.GGUF", **TINY)
    assert open_model_files(path).gguf_metadata is not None
    assert "TINY.GGUF" in refusal(tmp_path).message


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 988097824\n"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tiny.gguf"])
def test_a_git_lfs_pointer_is_named_as_one(directory, name):
    def read_all() -> None:
        files = open_model_files(directory / name if name == "tiny.gguf" else directory)
        load_tokenizer(files)
        files.stored_tensors()

    (directory / name).write_text(POINTER)
    with pytest.raises(PdserveError) as caught:
        read_all()
    assert caught.value.message.startswith(f"{directory / name} is a git-lfs pointer")
    assert "git lfs pull" in caught.value.message


@pytest.mark.parametrize("value", ["absent", [], None])
def test_a_config_that_names_no_architecture_is_told_which_key_it_lacks(directory, value):
    edit(directory / "config.json", architectures=value)
    assert refusal(directory).message.startswith("architectures is missing in the model's config.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": 1, "a": 2}', b"\xff\xfe"])
def test_a_broken_config_is_refused(directory, content):
    (directory / "config.json").write_bytes(content)
    assert "config.json" in refusal(directory).message


def test_fingerprint_depends_on_config_tensors_and_load_dtype(directory, tmp_path):
    base = fingerprint(open_model_files(directory), "float32")
    again = write_tiny_llama(tmp_path / "again", **TINY)
    assert fingerprint(open_model_files(again), "float32") == base
    assert fingerprint(open_model_files(directory), "bfloat16") != base
    other_weights = write_tiny_llama(tmp_path / "other", seed=1, **TINY)
    assert fingerprint(open_model_files(other_weights), "float32") != base
    edit(again / "config.json", rope_theta=20000.0)
    assert fingerprint(open_model_files(again), "float32") != base
