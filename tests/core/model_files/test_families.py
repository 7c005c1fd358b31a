"""Every family's configs and tensors: transformers, given what we read, computes what it computes from the files."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_files import ModelConfig, open_model_files
from pdserve.core.model_files.architectures import all_families
from pdserve.core.model_files.families import __path__ as families_path
from tests.support.oracle import as_read, build_oracle, oracle_logits
from tests.support.tiny_models import FAMILIES, family_tensors, write_tiny, write_tiny_packed

IDS = [(37 * position + 5) % 300 for position in range(60)]
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}

PACKED = ("llama", "llama-biased", "mistral", "qwen2", "qwen3", "gemma3")
PACKED_SCALED = [(family, kind) for family in PACKED[:5] for kind in ("linear", "llama3", "yarn")] + [
    ("gemma3", "linear")
]


def read(directory: Path, family: str, **changes: object) -> ModelConfig:
    """The config of a directory that holds nothing but config.json; a change to "absent" removes a key."""
    raw = {key: value for key, value in (FAMILIES[family] | changes).items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(raw))
    return open_model_files(directory).config


def refusal(directory: Path, family: str, **changes: object) -> PdserveError:
    with pytest.raises(PdserveError) as caught:
        read(directory, family, **changes)
    return caught.value


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.window for layer in config.attention]


def test_every_module_of_families_is_found():
    modules = {path.stem for path in Path(families_path[0]).glob("*.py")} - {"__init__"}
    assert {type(family).__module__.rsplit(".", 1)[1] for family in all_families()} == modules
    for names in ("hugging_face_names", "gguf_names"):
        listed = [name for family in all_families() for name in getattr(family, names)]
        assert len(set(listed)) == len(listed)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_directory_is_read_as_transformers_reads_it(tmp_path, family):
    source = write_tiny(tmp_path, family, num_shards=2)
    assert {tensor.name for tensor in open_model_files(source).stored_tensors()} == set(
        family_tensors(FAMILIES[family])
    )
    assert torch.equal(oracle_logits(as_read(source), IDS), oracle_logits(build_oracle(source), IDS))


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rope_scaling_is_read_as_transformers_reads_it(tmp_path, family, kind):
    changes = {"max_position_embeddings": 64, "rope_scaling": SCALINGS[kind]}
    source = write_tiny(tmp_path, family, **changes)
    assert {layer.rope.kind for layer in open_model_files(source).config.attention} >= {kind}
    difference = oracle_logits(as_read(source), IDS) - oracle_logits(build_oracle(source), IDS)
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize(("family", "kind"), [(family, None) for family in PACKED] + PACKED_SCALED)
def test_gguf_holds_the_same_model(tmp_path, family, kind):
    changes = {"max_position_embeddings": 64, "rope_scaling": SCALINGS[kind]} if kind else {}
    source = write_tiny(tmp_path / "directory", family, **changes)
    packed = write_tiny_packed(tmp_path / "packed.gguf", family, **changes)
    wanted, found = open_model_files(source).config, open_model_files(packed).config
    for name in {field.name for field in fields(ModelConfig)} - {"attention", "stored_dtype"}:
        value = getattr(wanted, name)
        assert getattr(found, name) == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), name
    assert windows(found) == windows(wanted)
    names = {tensor.name for tensor in open_model_files(packed).stored_tensors()} - {"rope_freqs.weight"}
    assert names == {tensor.name for tensor in open_model_files(source).stored_tensors()}
    difference = oracle_logits(build_oracle(packed), IDS) - oracle_logits(build_oracle(source), IDS)
    assert difference.abs().max() < 1e-4


def test_llama(tmp_path):
    config = read(tmp_path, "llama", attention_bias=True)
    assert (config.qkv_bias, config.attention_out_bias, config.mlp_bias) == (True, True, False)
    assert not config.tie_word_embeddings
    assert read(tmp_path, "llama", head_dim="absent").attention_scale == 16**-0.5


@pytest.mark.parametrize(("window", "expected"), [(None, None), (7, 7), ("absent", 4096)])
def test_mistral_slides_everywhere_or_nowhere(tmp_path, window, expected):
    config = read(tmp_path, "mistral", sliding_window=window, num_key_value_heads="absent", num_attention_heads=8)
    assert windows(config) == [expected, expected]
    assert (config.architecture, config.num_kv_heads, config.head_dim) == ("MistralForCausalLM", 8, 32)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [None, None]),
        ({"sliding_window": 9}, [None, None]),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, [None, 9]),
        ({"use_sliding_window": True, "sliding_window": 9}, [None, None]),
        ({"use_sliding_window": True, "max_window_layers": 0}, [4096, 4096]),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, [None, None]),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [9, None],
        ),
    ],
)
def test_qwen_slides_in_its_upper_layers_if_at_all(tmp_path, family, changes, expected):
    assert windows(read(tmp_path, family, **changes)) == expected


def test_qwen_biases_and_norms(tmp_path):
    two = read(tmp_path, "qwen2", attention_bias=False)
    assert (two.qkv_bias, two.attention_out_bias, two.qk_norm) == (True, False, False)
    three = read(tmp_path, "qwen3", head_dim="absent")
    assert (three.qkv_bias, three.qk_norm, three.head_dim) == (False, True, 128)


def test_gemma3(tmp_path):
    config = read(tmp_path, "gemma3", sliding_window_pattern="absent", num_hidden_layers=7)
    assert windows(config) == [24] * 5 + [None, 24]
    assert [layer.rope.theta for layer in config.attention] == [2e4] * 5 + [1e6, 2e4]
    assert (config.embedding_scale, config.attention_scale) == (8.0, 24**-0.5)
    assert config.tie_word_embeddings
    described = read(tmp_path, "gemma3", layer_types=["full_attention"] * 4, sliding_window_pattern=None)
    assert windows(described) == [None] * 4
    bare = read(tmp_path, "gemma3", rope_theta="absent", rope_local_base_freq="absent", tie_word_embeddings=False)
    assert [layer.rope.theta for layer in bare.attention] == [1e4, 1e4, 1e6, 1e4]
    assert not bare.tie_word_embeddings


def test_gemma3_scaling_is_that_of_full_layers_and_counted_in_the_context(tmp_path):
    linear = {"rope_type": "linear", "factor": 8.0}
    old = read(tmp_path, "gemma3", rope_scaling=linear)
    nested = {"full_attention": linear | {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 2e4}}
    new = read(tmp_path, "gemma3", rope_theta="absent", rope_local_base_freq="absent", rope_parameters=nested)
    assert old == new
    assert [layer.rope.kind for layer in old.attention] == ["default", "default", "linear", "default"]
    assert old.context_length == 4096


def test_gemma3_with_images_is_read_as_its_text_side(tmp_path):
    """Its config says little, and its tensors have prefixes."""
    source = write_tiny(tmp_path / "text", "gemma3")
    expected = open_model_files(source)
    tensors = load_file(source / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(renamed | {"vision_tower.x.weight": torch.ones(1)}, source / "model.safetensors")
    raw = json.loads((source / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": raw["eos_token_id"]}
    (source / "config.json").write_text(json.dumps(outer | {"text_config": raw}))
    assert open_model_files(source).config == expected.config
    found = open_model_files(source).stored_tensors()
    assert {tensor.name: tensor.plus for tensor in found} == {
        name: 1.0 if name.endswith("norm.weight") else 0.0 for name in tensors
    }


@pytest.mark.parametrize(
    ("family", "changes", "name"),
    [
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("qwen2", {"rope_parameters": {"rope_type": "mrope"}}, "mrope"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"hidden_activation": "gelu"}, "gelu"),
        ("gemma3", {"architectures": ["Gemma2ForCausalLM"]}, "known: Gemma3ForCausalLM"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, family, changes, name):
    error = refusal(tmp_path, family, **changes)
    assert error.reason is ErrorReason.UNSUPPORTED
    assert name in error.message


@pytest.mark.parametrize(
    ("family", "changes", "name"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        ("gemma3", {"sliding_window": None}, "sliding_window"),
        ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("gemma3", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
        ("gemma3", {"rope_parameters": {"full_attention": [1]}}, "full_attention"),
    ],
)
def test_nonsense_is_refused_by_name(tmp_path, family, changes, name):
    error = refusal(tmp_path, family, **changes)
    assert error.reason is ErrorReason.INVALID_ARGUMENT
    assert name in error.message
