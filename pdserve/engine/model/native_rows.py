"""Lays out one step's rows for the compiled decoder: who writes where, and which units of attention there are."""

import numpy as np
from numpy.typing import NDArray

from pdserve.core.model_files import ModelConfig
from pdserve.engine.model.interface import Int32s, StepInput
from pdserve_kernels.cpu.attention import scratch_bytes, unit_positions, unit_rows
from pdserve_kernels.cpu.gemm import TILE_BYTES
from pdserve_kernels.cpu.job import UNIT

_UNITS_PER_THREAD = 4
"""So many sequences a thread are enough to share out whole ones, whose heads lie together in memory."""


class NativeRows:
    """Buffers for at most `max_rows` rows; `lay_out` fills them and puts their addresses into a job."""

    def __init__(self, config: ModelConfig, max_rows: int, num_threads: int) -> None:
        self._max_rows = max_rows
        self._num_threads = num_threads
        group = config.num_heads // config.num_kv_heads
        self._unit_positions = unit_positions(group)
        self._num_kv_heads = config.num_kv_heads
        self._heads_at_once = max(1, min(config.num_kv_heads, unit_rows(group) // group))
        self.scratch_bytes = -(-max(scratch_bytes(group, config.head_dim), TILE_BYTES) // 64 + 1) * 64
        self._token_ids, self._positions, self._row_sequences, self._is_last = np.zeros((4, max_rows), dtype=np.int32)
        self._tables = np.zeros(max_rows, dtype=np.int64)
        self._units = np.zeros(0, dtype=UNIT)
        self._num_decoding = 0

    def lay_out(self, step: StepInput, job: np.void) -> None:
        """Everything a step's job needs but the pool."""
        num_rows, num_sequences = len(step.token_ids), len(step.query_lens)
        if num_rows > self._max_rows:
            raise RuntimeError(f"{num_rows} rows in one step, at most {self._max_rows}")
        if num_rows > num_sequences or num_sequences != self._num_decoding:
            self._num_decoding = 0
            self._lay_out_chunks(step, job)
            self._num_decoding = num_sequences if num_rows == num_sequences else 0
        self._tables[:num_sequences] = [table.address for table in step.block_tables]
        self._token_ids[:num_rows] = step.token_ids
        self._positions[:num_rows] = step.positions

    def _lay_out_chunks(self, step: StepInput, job: np.void) -> None:
        """What stays as it is from step to step while the same number of sequences decodes."""
        num_rows = len(step.token_ids)
        ends = np.cumsum(step.query_lens)
        self._row_sequences[:num_rows] = np.repeat(np.arange(len(step.query_lens)), step.query_lens)
        self._is_last[:num_rows] = 0
        self._is_last[ends - 1] = 1
        self._units = self._make_units(step, ends - step.query_lens)
        job["num_rows"], job["num_units"] = num_rows, len(self._units)
        for name, array in (
            ("token_ids", self._token_ids),
            ("positions", self._positions),
            ("row_sequences", self._row_sequences),
            ("row_is_last", self._is_last),
            ("tables", self._tables),
            ("units", self._units),
        ):
            job[name] = array.ctypes.data

    def _make_units(self, step: StepInput, starts: Int32s) -> NDArray[np.void]:
        """A chunk's later positions, which cost most, come first."""
        singles = np.flatnonzero(step.query_lens == 1)
        size, heads = self._unit_positions, self._num_kv_heads
        chunks = [
            (starts[i] + at, min(size, step.query_lens[i] - at), i, head, 1)
            for i in np.flatnonzero(step.query_lens > 1)
            for at in reversed(range(0, step.query_lens[i], size))
            for head in range(heads)
        ]
        at_once = self._heads_at_once if len(singles) >= _UNITS_PER_THREAD * self._num_threads else 1
        parts = -(-heads // at_once)
        units = np.empty(len(chunks) + parts * len(singles), dtype=UNIT)
        units[: len(chunks)] = chunks
        rest = units[len(chunks) :].reshape(len(singles), parts)
        rest["row"], rest["num_positions"], rest["sequence"] = starts[singles, None], 1, singles[:, None]
        rest["head"] = np.arange(0, heads, at_once)
        rest["num_heads"] = np.minimum(at_once, heads - rest["head"])
        return units
