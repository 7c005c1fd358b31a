"""The compiled decoder beside torch's on odd shapes, and after whatever may have gone before."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pdserve.core.model_files import open_model_files
from pdserve.engine.block_table import BlockTable
from pdserve.engine.model.interface import StepInput
from pdserve.engine.model.native_decoder import NativeDecoderModel, NativeLimits
from pdserve.engine.model.native_rows import NativeRows
from pdserve.engine.weights import load_weights
from pdserve_kernels.cpu.team import make_team
from pdserve_kernels.host import why_not_here
from tests.support.engine_harness import Engine, build_engine
from tests.support.native_engine import ARITHMETICS, native_engine, native_model
from tests.support.tiny_models import write_tiny, write_tiny_llama

pytestmark = pytest.mark.skipif(bool(why_not_here()), reason=f"native kernels cannot run: {why_not_here()}")

SHAPES = {
    "head-dim-24": ("llama", {"head_dim": 24, "hidden_size": 88, "intermediate_size": 130, "vocab_size": 301}),
    "head-dim-80": ("llama-biased", {"head_dim": 80, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "untied-biased": ("llama-biased", {"tie_word_embeddings": False, "intermediate_size": 70}),
    "group-7": ("qwen2", {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 16}),
    "window-over-a-tile": ("mistral", {"sliding_window": 100}),
    "window-under-a-tile": ("mistral", {"sliding_window": 20, "head_dim": 24}),
    "qk-norm": ("qwen3", {"head_dim": 24}),
    "sandwich-gelu": ("gemma3", {"intermediate_size": 90, "hidden_size": 72, "sliding_window": 70}),
    "one-kv-head": ("gemma3", {"num_key_value_heads": 1, "head_dim": 256, "num_attention_heads": 2}),
}
"""A tiny model, and what its config says besides: sizes that fill no vector, and every part a decoder may have."""
LENGTH = 150


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


@pytest.fixture(scope="module", params=SHAPES)
def source(request, tmp_path_factory) -> Path:
    family, fields = SHAPES[request.param]
    return write_tiny(tmp_path_factory.mktemp("models") / request.param, family, **fields)


def all_logits(engine: Engine, ids: list[int]) -> torch.Tensor:
    """Of every position, [tokens, vocab_size]."""
    engine.prefill(engine.sequence(ids))
    return torch.from_numpy(engine.model.logits(np.arange(len(ids), dtype=np.int32))).clone()


def test_results_are_those_of_torch(source):
    """fp32 to rounding; bf16 no further from fp32 than torch's."""
    exact = all_logits(build_engine(source, kernels="torch"), prompt(LENGTH))
    torch.testing.assert_close(
        all_logits(native_engine(native_model(source)), prompt(LENGTH)), exact, atol=1e-4, rtol=0
    )
    torchs = all_logits(build_engine(source, "bfloat16", kernels="torch"), prompt(LENGTH)) - exact
    for arithmetic in ARITHMETICS.keys() - {"float32"}:
        ours = all_logits(native_engine(native_model(source, arithmetic)), prompt(LENGTH)) - exact
        assert ours.square().mean() < 1.1 * torchs.square().mean(), arithmetic
        assert ours.abs().max() < 0.15 * exact.abs().max()


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
def test_bits_of_odd_shapes_depend_on_neither_chunks_nor_threads(source, arithmetic):
    ids = prompt(LENGTH)
    whole = native_engine(native_model(source, arithmetic))
    cut = native_engine(native_model(source, arithmetic, threads=2))
    first, second = whole.sequence(ids), cut.sequence(ids)
    np.testing.assert_array_equal(whole.prefill(first), cut.prefill(second, 37))
    assert torch.equal(whole.kv(first), cut.kv(second))


# --- steps one after another ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> NativeDecoderModel:
    return native_model(write_tiny_llama(tmp_path_factory.mktemp("tiny")), "bfloat16")


def alone(model: NativeDecoderModel, ids: list[int]) -> np.ndarray:
    """The last position's logits, computed in a pool of its own."""
    engine = native_engine(model)
    return engine.prefill(engine.sequence(ids))


def decoding(engine: Engine, length: int, seed: int):
    """A sequence that has its prompt behind it."""
    sequence = engine.sequence(prompt(length, seed), room=400)
    engine.prefill(sequence)
    return sequence


def assert_steps_right(engine: Engine, model: NativeDecoderModel, *parts) -> None:
    """One step of (sequence, tokens); each one's logits are those it has alone."""
    logits = engine.step(*parts).copy()
    expected = [alone(model, sequence.token_ids[: sequence.num_computed_tokens]) for sequence, _ in parts]
    np.testing.assert_array_equal(logits, expected)


def test_as_many_decoding_sequences_as_before_but_others(tiny):
    engine = native_engine(tiny)
    sequences = [decoding(engine, 20 + 7 * n, n) for n in range(4)]
    for batch in ((0, 1), (2, 3), (3, 0), (1, 2), (2, 1)):
        assert_steps_right(engine, tiny, *((sequences[n], 1) for n in batch))


def test_prefill_and_decode_take_turns(tiny):
    engine = native_engine(tiny)
    sequences = [decoding(engine, 15 + n, n) for n in range(2)]
    new = engine.sequence(prompt(90, 9), room=100)
    for size in (30, 1, 1, 33):
        assert_steps_right(engine, tiny, *((s, 1) for s in sequences))
        engine.step((new, size))
        engine.step((sequences[0], 1), (new, 1), (sequences[1], 1))
    assert new.num_computed_tokens == 69
    assert_steps_right(engine, tiny, (new, new.num_remaining_tokens), *((s, 1) for s in sequences))
    assert_steps_right(engine, tiny, *((s, 1) for s in (*sequences, new)))


def test_a_chunk_of_one_token_is_no_decode_row_that_stays(tiny):
    """A step of single rows, then one of as many sequences with more rows, then single rows again."""
    engine = native_engine(tiny)
    first, second = decoding(engine, 10, 1), engine.sequence(prompt(40, 2))
    engine.step((first, 1), (second, 1))
    engine.step((first, 1), (second, 38))
    assert_steps_right(engine, tiny, (first, 1), (second, 1))


def test_tables_that_move_while_their_sequences_decode(tiny):
    """16 ids are a table's first capacity: with blocks of 2 slots it is full after 32 tokens."""
    engine = native_engine(tiny, block_size=2)
    sequences = [decoding(engine, 27, n) for n in range(2)]
    spare = [sequence.block_ids[14:] for sequence in sequences]
    for sequence in sequences:
        sequence.block_ids, sequence.block_table = sequence.block_ids[:14], BlockTable()
    addresses = set()
    for _ in range(12):
        for sequence, blocks in zip(sequences, spare, strict=True):
            if sequence.num_tokens > 2 * len(sequence.block_ids):
                sequence.block_ids.append(blocks.pop(0))
        assert_steps_right(engine, tiny, *((s, 1) for s in sequences))
        addresses.add(sequences[0].block_table.address)
    assert len(addresses) == 2


def test_a_sequence_whose_blocks_are_replaced_by_others(tiny):
    """Its KV was moved: as many blocks, of other ids."""
    engine = native_engine(tiny)
    sequence, other = decoding(engine, 40, 1), decoding(engine, 40, 2)
    engine.step((sequence, 1), (other, 1))
    moved = list(range(engine.next_block, engine.next_block + len(sequence.block_ids)))
    engine.paged_kv.pool[moved] = engine.paged_kv.pool[sequence.block_ids]
    engine.paged_kv.pool[sequence.block_ids] = float("nan")
    sequence.block_ids = moved
    assert_steps_right(engine, tiny, (sequence, 1), (other, 1))


def step_input(
    token_ids: list[int],
    positions: list[int],
    query_lens: list[int],
    tables: list[BlockTable],
    sample_rows: Seq[int] = (),
):
    ids, positions_, lens, samples = (
        np.array(values, dtype=np.int32) for values in (token_ids, positions, query_lens, sample_rows)
    )
    ends = positions_[np.cumsum(lens) - 1] + 1 if len(lens) else lens
    return StepInput(ids, positions_, lens, ends.astype(np.int32), tables, samples)


def some_table(*block_ids: int) -> BlockTable:
    table = BlockTable()
    table.follow(block_ids)
    return table


@pytest.fixture
def small(tmp_path) -> tuple[NativeDecoderModel, torch.Tensor]:
    """With room for eight rows and three samples, and its pool."""
    files = open_model_files(write_tiny_llama(tmp_path / "tiny"))
    model = NativeDecoderModel(files.config, torch.float32, NativeLimits(8, 3), make_team(1))
    load_weights(files, model)
    return model, torch.zeros(6, 2, 2, 2, 16, 16)


def test_more_rows_than_there_is_room_for_are_refused_and_nothing_is_written(small):
    model, pool = small
    for rows, sequences in ((9, 1), (9, 9)):
        lens = [rows] if sequences == 1 else [1] * rows
        step = step_input([5] * rows, list(range(rows)), lens, [some_table(1)] * sequences)
        with pytest.raises(RuntimeError, match="9 rows in one step, at most 8"):
            model.forward(step, pool)
        assert (pool == 0).all()
    with pytest.raises(RuntimeError, match="4 rows of logits, at most 3"):
        model.forward(step_input([5] * 4, list(range(4)), [4], [some_table(1)], [0, 1, 2, 3]), pool)
    assert (pool == 0).all()
    with pytest.raises(RuntimeError, match="4 rows of logits, at most 3"):
        model.logits(np.zeros(4, dtype=np.int32))


def test_as_many_rows_as_there_is_room_for_are_computed(small):
    model, pool = small
    logits = model.forward(step_input(prompt(8), list(range(8)), [8], [some_table(2)], [0, 3, 7]), pool).copy()
    assert (pool[2] != 0).any()
    assert np.isfinite(logits).all()
    np.testing.assert_array_equal(model.logits(np.int32([0, 3, 7])), logits)


def test_a_step_without_rows_writes_nothing_and_the_next_is_as_ever(small):
    model, pool = small
    whole = step_input(prompt(5), list(range(5)), [5], [some_table(2)])
    model.forward(whole, pool)
    expected, written = model.logits(np.int32([4])).copy(), pool.clone()
    pool.zero_()
    model.forward(step_input([], [], [], []), pool)
    assert (pool == 0).all()
    assert model.logits(np.zeros(0, dtype=np.int32)).shape == (0, 300)
    model.forward(whole, pool)
    np.testing.assert_array_equal(model.logits(np.int32([4])), expected)
    assert torch.equal(pool, written)


def out_of_memory(*arguments: object) -> None:
    raise MemoryError


def test_a_step_that_fails_leaves_nothing_behind(small, monkeypatch):
    """Decode rows, a step that fails early or late, and the same number of decode rows again."""
    model, pool = small
    tables = [some_table(1), some_table(2), some_table(3)]
    decode = step_input(prompt(3), [0, 0, 0], [1, 1, 1], tables)
    model.forward(decode, pool)
    expected, written = model.logits(np.int32([0, 1, 2])).copy(), pool.clone()
    chunks = step_input(prompt(7), [0, 1, 2, 0, 0, 1, 2], [3, 1, 3], tables)
    uneven, short = replace(chunks, query_lens=np.int32([3, 2, 1])), replace(chunks, block_tables=tables[:2])
    for broken, error in ((uneven, ValueError), (short, ValueError), (chunks, MemoryError)):
        pool.zero_()
        with monkeypatch.context() as patch:
            if error is MemoryError:
                patch.setattr(NativeRows, "_make_units", out_of_memory)
            with pytest.raises(error):
                model.forward(broken, pool)
        assert (pool == 0).all()
        model.forward(decode, pool)
        np.testing.assert_array_equal(model.logits(np.int32([0, 1, 2])), expected)
        assert torch.equal(pool, written)


def test_nothing_runs_before_the_weights_are_packed(tmp_path):
    files = open_model_files(write_tiny_llama(tmp_path / "tiny"))
    model = NativeDecoderModel(files.config, torch.float32, NativeLimits(8, 3), make_team(1))
    with pytest.raises(RuntimeError, match="before freeze"):
        model.forward(step_input([5], [0], [1], [some_table(1)]), torch.zeros(6, 2, 2, 2, 16, 16))
    with pytest.raises(RuntimeError, match="before freeze"):
        model.logits(np.zeros(1, dtype=np.int32))
    load_weights(files, model)
    with pytest.raises(RuntimeError, match="packed already"):
        model.freeze()
    with pytest.raises(RuntimeError, match="packed already"):
        model.destinations()
