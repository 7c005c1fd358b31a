"""A decoder's parameters as compiled kernels read them: packed, side by side on huge pages. Computes nothing."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.core.model_files import ModelConfig
from pdserve.engine.freed_memory import return_freed_memory
from pdserve.engine.model.area import Area, aligned
from pdserve.engine.model.parameters import DecoderParameters, LayerParameters, Projection
from pdserve.engine.model.rope import rope_table, rope_table_bytes
from pdserve_kernels.cpu.gemm import interleave_gate_up, pack, packed_bytes
from pdserve_kernels.cpu.job import LAYER

_BLOCK_ROWS = 16
"""Gate and up alternate by so many rows."""
_PROJECTIONS = ("qkv", "attention_out", "gate_up", "down")
_NORMS = ("attention_norm", "query_norm", "key_norm", "attention_out_norm", "mlp_norm", "down_norm")


class PackedWeights:
    """Holds what it puts the addresses of into a job: keep it as long as the job is used."""

    def __init__(self, config: ModelConfig, parameters: DecoderParameters, job: np.void) -> None:
        """Packs matrix by matrix, and takes each layer out of `parameters` as it goes: at most one is there twice."""
        self._config = config
        self._area = Area(packed_weight_bytes(config, parameters))
        self._layers = self._pack_layers(parameters)
        job["layers"] = self._layers.ctypes.data
        job["embedding"] = job["head"] = self._put_matrix(parameters.embedding)
        if parameters.head is not parameters.embedding:
            job["head"] = self._put_matrix(parameters.head)
        job["final_norm"] = self._put(parameters.final_norm)

    @property
    def num_unused_bytes(self) -> int:
        """Of what was foreseen: 0."""
        return self._area.num_free_bytes

    def _pack_layers(self, parameters: DecoderParameters) -> NDArray[np.void]:
        config = self._config
        tables = {
            rope: rope_table(rope, config.head_dim, config.context_length, parameters.rope_factors)
            for rope in {attention.rope for attention in config.attention}
        }
        rotations = {rope: (self._put(table.cos), self._put(table.sin)) for rope, table in tables.items()}
        layers = np.zeros(len(parameters.layers), dtype=LAYER)
        for record, attention in zip(layers, config.attention, strict=True):
            self._pack_layer(record, parameters.layers.pop(0))
            return_freed_memory()
            record["cos"], record["sin"] = rotations[attention.rope]
            record["window"] = attention.window or 0
        return layers

    def _pack_layer(self, record: np.void, layer: LayerParameters) -> None:
        for name in _PROJECTIONS:
            projection: Projection = getattr(layer, name)
            interleaved = name == "gate_up"
            record[name] = self._put_matrix(interleave_gate_up(projection.weight) if interleaved else projection.weight)
            if projection.bias is not None:
                bias = interleave_gate_up(projection.bias) if interleaved else projection.bias
                record[f"{name}_bias"] = self._put(_padded_bias(bias))
        for name in _NORMS:
            norm: Tensor | None = getattr(layer, name)
            record[name] = 0 if norm is None else self._put(norm)

    def _put_matrix(self, weight: Tensor) -> int:
        rows, inner = weight.shape
        return pack(weight, self._area.take(packed_bytes(rows, inner, weight.itemsize))).address

    def _put(self, tensor: Tensor) -> int:
        """The address of its copy here."""
        place = self._area.take(tensor.nbytes)
        place.view(tensor.dtype).copy_(tensor.flatten())
        return place.data_ptr()


def packed_weight_bytes(config: ModelConfig, parameters: DecoderParameters) -> int:
    """All that `PackedWeights` holds of them, rotation tables and padding included."""
    matrices = [parameters.embedding]
    if parameters.head is not parameters.embedding:
        matrices.append(parameters.head)
    table_bytes = aligned(rope_table_bytes(config.head_dim, config.context_length) // 2)
    num_tables = 2 * len({attention.rope for attention in config.attention})
    return (
        sum(_matrix_bytes(matrix.shape[0], matrix) for matrix in matrices)
        + sum(_layer_bytes(layer) for layer in parameters.layers)
        + num_tables * table_bytes
        + aligned(parameters.final_norm.nbytes)
    )


def _layer_bytes(layer: LayerParameters) -> int:
    total = 0
    for name in _PROJECTIONS:
        projection: Projection = getattr(layer, name)
        rows = projection.weight.shape[0]
        if name == "gate_up":
            rows = 2 * _multiple(rows // 2, _BLOCK_ROWS)
        total += _matrix_bytes(rows, projection.weight)
        if projection.bias is not None:
            total += aligned(4 * _padded_size(rows))
    norms: list[Tensor | None] = [getattr(layer, name) for name in _NORMS]
    return total + sum(aligned(norm.nbytes) for norm in norms if norm is not None)


def _matrix_bytes(rows: int, weight: Tensor) -> int:
    return aligned(packed_bytes(rows, weight.shape[1], weight.itemsize))


def _padded_bias(bias: Tensor) -> Tensor:
    """fp32, zeros behind, up to the columns of a packed weight."""
    padded = torch.zeros(_padded_size(len(bias)), dtype=torch.float32)
    padded[: len(bias)] = bias.float()
    return padded


def _padded_size(size: int) -> int:
    return _multiple(size, 2 * _BLOCK_ROWS)


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of
