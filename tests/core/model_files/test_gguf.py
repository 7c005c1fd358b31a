"""What a GGUF file's metadata may say beyond what tiny checkpoints do, and what is refused of it."""

from dataclasses import fields

import gguf
import pytest

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_files import ModelConfig, gguf_config, open_model_files
from pdserve.core.model_files.architectures import gguf_family
from pdserve.core.model_files.config import RopeConfig
from pdserve.core.model_files.gguf_header import read_gguf_header
from tests.support.tiny_models import write_tiny_gguf, write_tiny_packed


def read(architecture: str, tensors: tuple[str, ...] = (), **changes: object) -> ModelConfig:
    """A config with `changes` to the architecture's keys ("__" for "."); one changed to None is missing."""
    raw = {
        "context_length": 4096,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "vocab_size": 300,
        "attention.sliding_window": 24 if architecture == "gemma3" else 0,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    metadata: dict[str, object] = {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key}": value for key, value in raw.items() if value is not None}
    return gguf_family(architecture).from_gguf(metadata, dict.fromkeys(tensors, "F32"))


def test_defaults():
    config = read("llama")
    assert (config.num_kv_heads, config.head_dim, config.attention_scale) == (4, 16, 0.25)
    assert (config.tie_word_embeddings, config.qkv_bias, config.eos_token_ids) == (True, False, ())
    assert read("gemma3").attention[0].rope.theta == 10_000.0
    assert read("gemma3", block_count=6).attention[5].rope.theta == 1_000_000.0


def test_biases_and_head_are_there_if_their_tensors_are():
    config = read("llama", ("output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_gate.bias"))
    assert (config.qkv_bias, config.attention_out_bias, config.mlp_bias) == (True, True, True)
    assert not config.tie_word_embeddings
    assert read("qwen2").qkv_bias


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, RopeConfig(10_000.0)),
        ({"rope__scaling__factor": 4.0}, RopeConfig(10_000.0, "linear", 4.0)),
        ({"rope__scale_linear": 4.0, "rope__freq_base": 5e5}, RopeConfig(5e5, "linear", 4.0)),
    ],
)
def test_rope_scaling(changes, expected):
    config = read("llama", **changes)
    assert config.attention[0].rope == expected
    assert config.context_length == 4096 * expected.factor


def test_yarn():
    """llama.cpp multiplies what yarn infers from the factor by what the file says."""
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    yarn["rope__scaling__original_context_length"] = 2048
    plain = read("qwen3", **yarn)
    assert (plain.context_length, plain.attention[0].rope.original_context_length) == (8192, 2048)
    scaled = read("qwen3", **yarn, rope__scaling__attn_factor=0.5, rope__scaling__yarn_beta_fast=16.0)
    assert scaled.attention[0].rope.beta_fast == 16.0
    assert scaled.attention[0].rope.attention_factor == pytest.approx(plain.attention[0].rope.attention_factor / 2)


def test_rope_freqs_scale_the_frequencies():
    config = read("llama", ("rope_freqs.weight",))
    assert (config.attention[0].rope.kind, config.context_length) == ("factors", 4096)


def test_gemma3_layers_and_scale():
    windows = [layer.window for layer in read("gemma3", attention__sliding_window_pattern=[True, False]).attention]
    assert windows == [24, None]
    assert read("gemma3", rope__freq_base_swa=5e3).attention[0].rope.theta == 5e3
    of_27b = read("gemma3", block_count=62, embedding_length=5376, attention__head_count=32, attention__key_length=128)
    assert of_27b.attention_scale == pytest.approx(168**-0.5)


@pytest.mark.parametrize(
    ("architecture", "changes", "name"),
    [
        ("llama", {"expert_count": 8}, "mixture of experts"),
        ("llama", {"rope__dimension_count": 8}, "partial_rotary_factor"),
        ("llama", {"attention__value_length": 8}, "value heads"),
        ("llama", {"rope__scaling__type": "longrope", "rope__scaling__factor": 4.0}, "longrope"),
        ("llama", {"tensors": ("rope_freqs.weight",), "rope__scaling__factor": 4.0}, "rope_freqs.weight"),
        ("qwen3", {"attention__sliding_window": 24}, "sliding_window"),
        ("qwen2", {"rope__scaling__type": "yarn", "rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ("qwen2", {"rope__scaling__type": "yarn", "rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("mamba", {}, "known: gemma3, llama, qwen2, qwen3"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(architecture, changes, name):
    with pytest.raises(PdserveError) as caught:
        read(architecture, **changes)
    assert caught.value.reason is ErrorReason.UNSUPPORTED
    assert name in caught.value.message


@pytest.mark.parametrize(
    ("architecture", "changes", "name"),
    [
        ("llama", {"block_count": None}, "block_count"),
        ("llama", {"block_count": 2**40}, "block_count"),
        ("llama", {"attention__head_count_kv": [1, 2]}, "attention.head_count_kv"),
        ("qwen2", {"rope__scaling__type": "yarn"}, "factor"),
        ("gemma3", {"attention__sliding_window": None}, "attention.sliding_window"),
        ("gemma3", {"attention__sliding_window_pattern": [True]}, "sliding_window_pattern"),
    ],
)
def test_nonsense_is_refused_by_name(architecture, changes, name):
    with pytest.raises(PdserveError) as caught:
        read(architecture, **changes)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    assert name in caught.value.message


def test_a_file_split_into_several_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(PdserveError, match="merged into one"):
        open_model_files(tmp_path / "part.gguf")


def test_the_ids_that_end_a_sequence_are_those_of_all_keys(tmp_path):
    data = write_tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    for key in (b"eot", b"eom"):
        path = tmp_path / "other.gguf"
        path.write_bytes(data.replace(b"tokenizer.ggml.eos_token_id", b"tokenizer.ggml." + key + b"_token_id"))
        assert open_model_files(path).config.eos_token_ids == (2,)


def test_tokens_that_end_a_turn_or_a_text_end_a_sequence(tmp_path):
    control, normal, user_defined = 3, 1, 4
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_token_list(["<eos>", "<end_of_turn>", "<|im_end|>", "x", "<|endoftext|>", "<|end|>"])
    writer.add_token_types([control, control, normal, normal, control, user_defined])
    writer.add_eos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_gguf_header(tmp_path / "tiny.gguf").metadata
    assert gguf_config.eos_token_ids(metadata) == (0, 1, 4, 5)


@pytest.mark.parametrize("quant", ["F16", "Q8_0", "Q4_0"])
def test_quantisation_changes_the_tensors_types_alone(tmp_path, quant):
    plain = open_model_files(write_tiny_packed(tmp_path / "plain.gguf", "gemma3"))
    packed = open_model_files(write_tiny_packed(tmp_path / "packed.gguf", "gemma3", quant))
    for field in {field.name for field in fields(ModelConfig)} - {"stored_dtype"}:
        assert getattr(packed.config, field) == getattr(plain.config, field)
    assert [t.name for t in packed.stored_tensors()] == [t.name for t in plain.stored_tensors()]
    assert {t.dtype for t in packed.stored_tensors() if len(t.shape) == 2} == {quant}
