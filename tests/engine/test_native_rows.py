"""A step's units of attention cover every row and KV head once, within what a thread's scratch holds."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.model_files import ModelConfig, open_model_files
from pdserve.engine.block_table import BlockTable
from pdserve.engine.model.interface import StepInput
from pdserve.engine.model.native_rows import NativeRows
from pdserve_kernels.cpu.attention import unit_rows
from pdserve_kernels.cpu.job import JOB
from tests.support.tiny_models import write_tiny_llama

HEADS = [(1, 1), (4, 2), (9, 3), (14, 1), (16, 16), (194, 97), (250, 1)]


@pytest.fixture(scope="module", params=HEADS, ids=str)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    heads, kv_heads = request.param
    directory = tmp_path_factory.mktemp("tiny")
    shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 4, "hidden_size": 8, "num_layers": 1}
    return open_model_files(write_tiny_llama(directory, **shape)).config


def step_of(lens: list[int]) -> StepInput:
    """Sequence i's rows end at position 1000 + i."""
    query_lens = np.array(lens, dtype=np.int32)
    ends = 1000 + np.arange(len(lens), dtype=np.int32)
    positions = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, lens, strict=True)])
    tables = [BlockTable() for _ in lens]
    return StepInput(np.zeros(sum(lens), np.int32), positions.astype(np.int32), query_lens, ends, tables, ends[:0])


def assert_covers(rows: NativeRows, job: np.void, config: ModelConfig, lens: list[int]) -> None:
    group = config.num_heads // config.num_kv_heads
    starts = np.cumsum([0, *lens])
    covered: Counter[tuple[int, int]] = Counter()
    for row, num_positions, sequence, head, num_heads in rows._units[: job["num_units"]].tolist():
        assert starts[sequence] <= row
        assert row + num_positions <= starts[sequence + 1]
        assert num_positions * num_heads * group <= unit_rows(group)
        assert num_positions == 1 or num_heads == 1
        covered.update((row + i, head + h) for i in range(num_positions) for h in range(num_heads))
    assert job["num_rows"] == sum(lens)
    assert covered == Counter((row, head) for row in range(sum(lens)) for head in range(config.num_kv_heads))
    assert rows._row_sequences[: sum(lens)].tolist() == np.repeat(np.arange(len(lens)), lens).tolist()
    assert np.flatnonzero(rows._is_last[: sum(lens)]).tolist() == [end - 1 for end in starts[1:].tolist()]


LENS = st.lists(st.one_of(st.just(1), st.just(1), st.integers(1, 140)), min_size=1, max_size=9)


@given(steps=st.lists(LENS, min_size=1, max_size=5), threads=st.sampled_from([1, 2, 7]))
@settings(deadline=None, max_examples=30)
def test_every_row_and_head_is_in_one_unit_step_after_step(config, steps, threads):
    rows, job = NativeRows(config, 1300, threads), np.zeros(1, dtype=JOB)[0]
    for lens in steps:
        step = step_of(lens)
        rows.lay_out(step, job)
        assert_covers(rows, job, config, lens)
        assert rows._tables[: len(lens)].tolist() == [table.address for table in step.block_tables]
        assert rows._positions[: sum(lens)].tolist() == step.positions.tolist()


def test_while_as_many_decode_nothing_is_laid_out_anew(tmp_path: Path):
    config = open_model_files(write_tiny_llama(tmp_path)).config
    rows, job = NativeRows(config, 64, 1), np.zeros(1, dtype=JOB)[0]
    rows.lay_out(step_of([1] * 5), job)
    units = rows._units
    rows.lay_out(step_of([1] * 5), job)
    assert rows._units is units
    rows.lay_out(step_of([1] * 4), job)
    assert rows._units is not units
