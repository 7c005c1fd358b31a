"""The name of a way to compute a model: what a worker reports, and what a row of docs/quality.md was measured with."""

import xxhash

from pdserve.core.model_info import KvLayout

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def evaluation_id(fingerprint: str, dtype: str, layout: KvLayout, numerics_version: str) -> str:
    """Such as "bf16/cpu-1/fma/fp32-attention/0123456789abcdef". Workers with equal ids give a text equal probabilities.

    It covers the model, the dtype of its weights and activations, how its KV is stored and sharded, and the kernels'
    arithmetic; not the size of blocks and the order inside them, which change no result.

    Args:
        fingerprint: of the model and its load dtype.
        numerics_version: the kernels' own.
    """
    parts = (fingerprint, dtype, layout.dtype, layout.scale_layout, str(layout.head_shard_size), numerics_version)
    digest = xxhash.xxh3_64_hexdigest("\0".join(parts).encode())
    return f"{_SHORT.get(dtype, dtype)}/{numerics_version}/{digest}"
