"""What every family reads alike from a Hugging Face config.json. Families add what is theirs with `replace`."""

from collections.abc import Callable, Sequence
from typing import cast

from pdserve.core.model_files.config import Activation, AttentionConfig, ModelConfig, bad_model, unsupported
from pdserve.core.model_files.raw_values import (
    Raw,
    get_bool,
    get_float,
    get_int,
    require_count,
    require_int,
    require_num_layers,
)

_SLIDES = {"full_attention": False, "sliding_attention": True}
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def decoder_config(
    raw: Raw, eos_token_ids: tuple[int, ...], attention: tuple[AttentionConfig, ...], context_length: int
) -> ModelConfig:
    """A decoder of the Llama kind: biases as `attention_bias` and `mlp_bias` say, nothing else that is optional.

    Raises:
        PdserveError: a key is missing or absurd, or the config asks for what no family implements.
    """
    if raw.get("quantization_config") is not None:
        raise unsupported("quantization_config", "an unquantised checkpoint or a GGUF file works")
    num_heads = require_int(raw, "num_attention_heads")
    hidden_size = require_int(raw, "hidden_size")
    head_dim = get_int(raw, "head_dim", hidden_size // max(num_heads, 1))
    attention_bias = get_bool(raw, "attention_bias", False)
    return ModelConfig(
        architecture=architecture_name(raw),
        vocab_size=require_int(raw, "vocab_size"),
        num_layers=num_layers(raw),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=get_int(raw, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=require_int(raw, "intermediate_size"),
        rms_norm_eps=get_float(raw, "rms_norm_eps", 1e-6),
        attention=attention,
        attention_scale=max(head_dim, 1) ** -0.5,
        context_length=context_length,
        tie_word_embeddings=get_bool(raw, "tie_word_embeddings", False),
        eos_token_ids=eos_token_ids,
        stored_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32")[:60],
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=get_bool(raw, "mlp_bias", False),
        activation=_activation(raw),
    )


def architecture_name(raw: Raw) -> str:
    """The first of `architectures`.

    Raises:
        PdserveError: there is none.
    """
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        example = 'a list with the name of its class, such as ["LlamaForCausalLM"]'
        raise bad_model(f"architectures is missing in the model's config.json: {example}")
    return str(cast("list[object]", names)[0])


def num_layers(raw: Raw) -> int:
    return require_num_layers(raw, "num_hidden_layers")


def sliding_layers(raw: Raw, default: Callable[[int], bool]) -> list[bool]:
    """For each layer whether it has a sliding window: by `layer_types`, else by `default` of the layer's index."""
    found = raw.get("layer_types")
    if found is None:
        return [default(layer) for layer in range(num_layers(raw))]
    types = cast("list[object]", found) if isinstance(found, list) else []
    if len(types) != num_layers(raw):
        raise bad_model(f"layer_types in the model's config does not name the kind of {num_layers(raw)} layers")
    for kind in types:
        if not isinstance(kind, str) or kind not in _SLIDES:
            raise unsupported(f"layer type {str(kind)[:60]!r} (known: {', '.join(_SLIDES)})")
    return [_SLIDES[cast("str", kind)] for kind in types]


def attention_layers(
    slides: Sequence[bool], full: AttentionConfig, sliding: AttentionConfig
) -> tuple[AttentionConfig, ...]:
    return tuple(sliding if layer else full for layer in slides)


def require_window(raw: Raw, default: int) -> int:
    """`sliding_window` of a model in which a layer slides; `default` if the key is missing, but not if it is null."""
    return require_count({"sliding_window": default, **raw}, "sliding_window")


def _activation(raw: Raw) -> Activation:
    name = raw.get("hidden_activation") or raw.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise unsupported(f"hidden_act {str(name)[:60]!r} (known: {', '.join(_ACTIVATIONS)})")
    return _ACTIVATIONS[name]
