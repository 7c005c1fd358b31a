"""The same texts scored by Hugging Face transformers, on the same weights: the rival, and a second opinion on fp32.

transformers is no dependency of pdserve: install it to run this.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pdserve.core.model_files import open_model_files
from pdserve.engine.weights import decode_tensor
from pdserve_bench.quality.scores import Measurement, SliceScore

_SLAB_ROWS = 128
_HEAD = "lm_head.weight"
_CONFIGS: Any = AutoConfig
_MODELS: Any = AutoModelForCausalLM
"""Their types say too little for a checker."""


def score_transformers(source: Path, dtype: str, slices: Mapping[str, Sequence[int]]) -> Measurement:
    """Score each slice whole, with weights and activations in `dtype`, as transformers does unless told otherwise.

    Raises:
        ValueError: `source` is a GGUF file with conventions of its own, such as Gemma's: give the directory.
    """
    model = _MODELS.from_pretrained(source, dtype=torch.float32) if source.is_dir() else _read_gguf(source)
    model = model.to(getattr(torch, dtype)).eval()
    scores = tuple(_score(model, name, token_ids) for name, token_ids in slices.items())
    return Measurement(f"transformers {dtype}", "", scores)


def _read_gguf(source: Path) -> Any:
    """In fp32; config by transformers, weights dequantised by us."""
    files = open_model_files(source)
    weights = {tensor.name: decode_tensor(tensor).float() for tensor in files.stored_tensors()}
    if files.config.sandwich_norms or "rope_freqs.weight" in weights:
        raise ValueError(f"{source.name} stores weights in a way that transformers needs converted: give the directory")
    if files.config.tie_word_embeddings:
        weights[_HEAD] = weights["model.embed_tokens.weight"]
    model = _MODELS.from_config(_CONFIGS.from_pretrained(source.parent, gguf_file=source.name), dtype=torch.float32)
    model.load_state_dict(weights, strict=True)
    return model


@torch.inference_mode()
def _score(model: Any, name: str, token_ids: Sequence[int]) -> SliceScore:
    ids = torch.tensor(token_ids)
    hidden: Tensor = model.base_model(ids[:-1].unsqueeze(0)).last_hidden_state[0]
    nll = 0.0
    top_ids: list[int] = []
    for start in range(0, len(hidden), _SLAB_ROWS):
        rows = slice(start, start + _SLAB_ROWS)
        logits: Tensor = model.get_output_embeddings()(hidden[rows]).double()
        nll -= float(logits.log_softmax(-1).gather(1, ids[1:][rows].unsqueeze(1)).sum())
        top_ids += logits.argmax(-1).tolist()
    return SliceScore(name, nll, tuple(top_ids))
