"""Fills an empty model from its files: every parameter exactly once, or a typed failure that names what is wrong."""

import logging
from collections.abc import Callable, Iterator

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from pdserve.core.errors import PdserveError
from pdserve.core.model_files import ModelFiles, StoredTensor
from pdserve.core.model_files.config import bad_model, unsupported
from pdserve.engine.model.interface import Model
from pdserve.engine.model.parameters import EMBEDDING, LM_HEAD

Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes) as loading goes on."""

_LOG = logging.getLogger(__name__)
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTISED = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"})
_SLAB_ELEMENTS = 1 << 18
"""1 MiB in fp32, so that a slab's few copies stay in the processor's cache."""


@torch.inference_mode()
def load_weights(files: ModelFiles, model: Model, progress: Progress | None = None) -> None:
    """Write every parameter of `model` from `files`, and freeze it.

    Raises:
        PdserveError: a tensor is missing, comes twice, has the wrong shape or an unknown dtype; a file is broken.
    """
    _fill(files, model, progress)
    model.freeze()  # no reference to a parameter is left here: what the model drops is free


def _fill(files: ModelFiles, model: Model, progress: Progress | None) -> None:
    destinations = model.destinations()
    stored = files.stored_tensors()
    total_bytes = sum(tensor.num_bytes for tensor in stored)
    done_bytes = 0
    written: set[str] = set()
    unexpected: list[str] = []
    for tensor in stored:
        if tensor.name in destinations:
            if tensor.name in written:
                raise bad_model(f"{tensor.name} comes twice (again in {tensor.path})")
            _write(tensor, destinations[tensor.name])
            written.add(tensor.name)
        elif tensor.name == LM_HEAD and model.config.tie_word_embeddings:
            _warn_if_untied(tensor, stored)
        else:
            unexpected.append(tensor.name)
        done_bytes += tensor.num_bytes
        if progress is not None:
            progress(done_bytes, total_bytes)
    missing = destinations.keys() - written
    if missing:
        raise bad_model(
            f"{files.source} lacks {len(missing)} tensor(s) the model needs: {', '.join(sorted(missing)[:8])}"
        )
    if unexpected:
        _LOG.warning("ignored %d tensor(s) the model has no use for: %s", len(unexpected), ", ".join(unexpected))


def decode_tensor(tensor: StoredTensor) -> Tensor:
    """The whole tensor, as `load_weights` would write it: float32 if quantised or added to, else the file's dtype."""
    slabs = [slab for _, slab in _slabs(tensor)]
    return torch.cat(slabs)[torch.argsort(_row_order(tensor))] if tensor.rope_heads else torch.cat(slabs)


def _write(tensor: StoredTensor, destination: Tensor) -> None:
    if tensor.shape != tuple(destination.shape):
        raise bad_model(f"{tensor.name} has shape {list(tensor.shape)}; the model needs {list(destination.shape)}")
    order = _row_order(tensor) if tensor.rope_heads else None
    for first, slab in _slabs(tensor):
        if order is None:
            destination[first : first + len(slab)].copy_(slab)
        else:
            rows = order[first : first + len(slab)].to(destination.device)
            destination[rows] = slab.to(destination)


def _row_order(tensor: StoredTensor) -> Tensor:
    """For each stored row, the row where it belongs: pairs (2j, 2j + 1) of a head go to rows j and j + head_dim / 2."""
    num_rows = tensor.shape[0]
    in_halves = torch.arange(num_rows).view(tensor.rope_heads, 2, num_rows // tensor.rope_heads // 2)
    return in_halves.transpose(1, 2).flatten()


def _slabs(tensor: StoredTensor) -> Iterator[tuple[int, Tensor]]:
    """Runs of rows as (first row, values), so that a large quantised tensor is never whole in fp32."""
    data = _rows(tensor)
    row_elements = 1
    for size in tensor.shape[1:]:
        row_elements *= size
    rows_per_slab = max(1, _SLAB_ELEMENTS // row_elements)
    for first in range(0, len(data), rows_per_slab):
        rows = data[first : first + rows_per_slab]
        values = _decode(rows, tensor).view(len(rows), *tensor.shape[1:])
        yield first, values.float() + tensor.plus if tensor.plus else values


def _rows(tensor: StoredTensor) -> np.ndarray:
    """The tensor's bytes, uint8 [rows, bytes per row].

    Raises:
        PdserveError: the dtype is not known, or the bytes do not make up the shape.
    """
    num_elements = int(np.prod(tensor.shape))
    if tensor.dtype in _PLAIN:
        expected = num_elements * _PLAIN[tensor.dtype].itemsize
    elif tensor.dtype in _QUANTISED:
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[tensor.dtype]]
        expected = num_elements // block_elements * block_bytes
    else:
        raise unsupported(
            f"tensor dtype {tensor.dtype} (of {tensor.name})", f"known: {', '.join((*_PLAIN, *sorted(_QUANTISED)))}"
        )
    if not tensor.shape or not num_elements or expected != tensor.num_bytes:
        raise bad_model(f"{tensor.name} has {tensor.num_bytes} bytes for shape {list(tensor.shape)} in {tensor.dtype}")
    return tensor.map_bytes().reshape(tensor.shape[0], -1)


def _decode(rows: np.ndarray, tensor: StoredTensor) -> Tensor:
    if tensor.dtype in _PLAIN:
        return torch.from_numpy(np.ascontiguousarray(rows)).flatten().view(_PLAIN[tensor.dtype])
    if tensor.dtype == "Q4_1":
        return _decode_q4_1(torch.from_numpy(np.ascontiguousarray(rows)))
    return torch.from_numpy(gguf.dequantize(rows, GGMLQuantizationType[tensor.dtype]))


def _decode_q4_1(rows: Tensor) -> Tensor:
    """As the gguf package does, five times as fast: blocks of fp16 scale and least value, then 16 low and 16 high
    nibbles, low ones first."""
    scale, least, packed = rows.view(-1, 20).split_with_sizes((2, 2, 16), dim=1)
    levels = torch.stack((packed & 15, packed >> 4), dim=1).view(-1, 32).float()
    return levels.mul_(_half(scale)).add_(_half(least))


def _half(pairs: Tensor) -> Tensor:
    """uint8 [N, 2] as fp32 [N, 1]."""
    return pairs.contiguous().view(torch.float16).float()


def _warn_if_untied(head: StoredTensor, stored: list[StoredTensor]) -> None:
    """The config ties the head to the embeddings; a stored head is not used, and said to differ if it does."""
    embeddings = [tensor for tensor in stored if tensor.name == EMBEDDING]
    try:
        same = len(embeddings) == 1 and torch.equal(decode_tensor(head).float(), decode_tensor(embeddings[0]).float())
    except PdserveError:
        same = False
    if not same:
        _LOG.warning("%s in %s differs from the embeddings that the config ties it to; not used", head.name, head.path)
