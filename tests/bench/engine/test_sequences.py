"""The sequences of the benchmark: scattered blocks, and KV that is what the engine computes."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pdserve.engine.loading import EngineConfig, LoadedEngine, load_engine
from pdserve.engine.memory import MemoryLimits
from pdserve.engine.sequence import Sequence
from pdserve_bench.engine.plan import Workload
from pdserve_bench.engine.sequences import SequenceMaker, num_blocks_needed, run_prompt, run_step

WORKLOAD = Workload(Path(), "tiny", batches=(1, 3), contexts=(20, 70), prompt_lens=(60, 90), chunks=(16,), num_steps=5)
NUM_ROWS = 8
"""Of a decode cell: three of warm-up and the timed ones."""


def load(source: Path) -> LoadedEngine:
    memory = MemoryLimits(num_blocks=num_blocks_needed(WORKLOAD))
    return load_engine(EngineConfig(source, "tiny", dtype="float32", memory=memory))


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> LoadedEngine:
    return load(tiny_model)


def kv(engine: LoadedEngine, sequence: Sequence, num_tokens: int) -> torch.Tensor:
    """[blocks that are full, …] of the first `num_tokens` tokens."""
    return engine.paged_kv.pool[sequence.block_ids[: num_tokens // 16]]


@pytest.mark.parametrize("context", [20, 70])
def test_the_largest_batch_fits_in_scattered_blocks_of_its_own(engine: LoadedEngine, context: int) -> None:
    batch = SequenceMaker(engine, WORKLOAD).decode_batch(3, context, NUM_ROWS)
    blocks = [block for sequence in batch for block in sequence.block_ids]
    assert len(blocks) == len(set(blocks)) == 3 * -(-(context + NUM_ROWS - 1) // 16)
    assert sum(after != before + 1 for before, after in pairwise(blocks)) > len(blocks) // 2


def test_a_decode_batch_has_the_kv_that_the_engine_computes(engine: LoadedEngine) -> None:
    """All that differs between two of its sequences is their last token, and where their blocks are."""
    maker = SequenceMaker(engine, WORKLOAD)
    batch = maker.decode_batch(3, 70, NUM_ROWS)
    for sequence in batch:
        assert (sequence.num_tokens, sequence.num_computed_tokens) == (70, 69)
        assert sequence.token_ids[:69] == batch[0].token_ids[:69]
    copied = [kv(engine, sequence, 69).clone() for sequence in batch]
    computed = maker.prompt(70)
    computed.token_ids[:] = batch[0].token_ids
    run_prompt(engine, computed, 16)
    for one in copied:
        torch.testing.assert_close(one, kv(engine, computed, 69), rtol=0, atol=0)
    assert len({sequence.token_ids[69] for sequence in batch}) > 1


def test_steps_make_every_sequence_longer(engine: LoadedEngine) -> None:
    batch = SequenceMaker(engine, WORKLOAD).decode_batch(3, 70, NUM_ROWS)
    for _ in range(NUM_ROWS):
        run_step(engine, batch)
    assert {(sequence.num_tokens, sequence.num_computed_tokens) for sequence in batch} == {(78, 77)}


def test_seeds_decide_ids_and_blocks(engine: LoadedEngine) -> None:
    one, same = (SequenceMaker(engine, WORKLOAD).prompt(90) for _ in range(2))
    other = SequenceMaker(engine, replace(WORKLOAD, seed=1)).prompt(90)
    assert (one.token_ids, one.block_ids) == (same.token_ids, same.block_ids)
    assert one.token_ids != other.token_ids
    assert one.block_ids != other.block_ids


def test_a_row_without_a_token_is_no_measurement(tiny_model: Path) -> None:
    engine = load(tiny_model)
    batch = SequenceMaker(engine, WORKLOAD).decode_batch(1, 20, NUM_ROWS)
    engine.paged_kv.pool.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="no numbers"):
        run_step(engine, batch)
