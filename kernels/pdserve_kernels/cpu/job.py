"""The records that compiled kernels read: a model's weights and sizes, and one step's rows. Pointers are addresses.

A record is a numpy structured value; whoever fills one keeps alive what its addresses point to.
"""

import numpy as np

_PROJECTIONS = "qkv qkv_bias attention_out attention_out_bias gate_up gate_up_bias down down_bias"
_NORMS = "attention_norm query_norm key_norm attention_out_norm mlp_norm down_norm"
_POSITIONS = "cos sin window"

LAYER = np.dtype([(name, "i8") for names in (_PROJECTIONS, _NORMS, _POSITIONS) for name in names.split()])
"""One decoder layer: packed weights, fp32 biases and norms (0: there is none), rotation tables, window (0: none)."""

UNIT = np.dtype([(name, "i4") for name in ("row", "num_positions", "sequence", "head", "num_heads")])
"""A part of a step's attention: positions of a sequence from a row on, and KV heads."""

_MODEL = (
    "num_layers layers hidden_size intermediate_size num_heads num_kv_heads head_dim vocab_size activation is_bf16 "
    "attention embedding final_norm head"
)
_PAGES = "pool block_bytes layer_bytes block_size"
_STEP = "num_rows token_ids positions row_sequences row_is_last tables num_units units"
_LOGITS = "num_samples sample_rows logits"
_BUFFERS = "residual x x_stride qkv delta gated tickets meeting scratch scratch_stride"
_FUNCTIONS = "gemm attend num_threads give_way thread_number thread_count"
_PROFILE = "cycles_gemm cycles_attention cycles_other"
_FACTORS = "embedding_scale eps attention_scale"

JOB = np.dtype(
    [
        (name, "i8")
        for names in (_MODEL, _PAGES, _STEP, _LOGITS, _BUFFERS, _FUNCTIONS, _PROFILE)
        for name in names.split()
    ]
    + [(name, "f8") for name in _FACTORS.split()]
)
"""One call of a kernel.

`tables` [sequences]: addresses of int32 block ids. `units` [num_units] of UNIT. `row_is_last`: 1 where a chunk ends.
`x` holds inputs of products and attention's output, `gated` the inputs of the down projection, `delta` what a norm must
see before it is added to the residual stream. `scratch`: `scratch_stride` bytes a thread. `num_threads`: how many came
to the last call. Cycles add up.
"""
