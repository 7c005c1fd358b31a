"""A request's KV and logits have the same bits however they are computed: whatever runs beside it, in whatever chunks.

Pools hold noise before each run. `test_the_comparison_can_fail` is the negative control.
"""

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from pdserve.engine.sequence import Sequence
from pdserve_kernels.host import why_not_here
from tests.support.engine_harness import Engine, build_engine
from tests.support.native_engine import ARITHMETICS, fill_with_noise, native_engine, native_model, use_threads
from tests.support.tiny_models import write_tiny_llama

NUM_BLOCKS, LENGTH, NUM_TOKENS = 640, 530, 12
CHUNKS, BATCHES = [16, 64, 100, 512, None], [1, 2, 8, 32]
needs_native = pytest.mark.skipif(bool(why_not_here()), reason=f"native kernels cannot run: {why_not_here()}")


@dataclass(frozen=True)
class Way:
    """How a request is computed: chunk size (None: whole), sequences in the batch, tokens found in the cache."""

    chunk: int | None = None
    batch: int = 1
    num_warm: int = 0


@dataclass
class Bits:
    """What came of it: KV by position, logits of the sampled positions, and the tokens drawn."""

    kv: torch.Tensor
    logits: np.ndarray
    token_ids: list[int]


def same(one: Bits, other: Bits) -> bool:
    """In KV and logits, bit for bit."""
    same_kv = torch.equal(one.kv.contiguous().view(torch.uint8), other.kv.contiguous().view(torch.uint8))
    return same_kv and np.array_equal(one.logits.view(np.int32), other.logits.view(np.int32))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


@dataclass
class Neighbours:
    """Random sequences: most decode; one brings a prompt, a chunk of a random size a step."""

    engine: Engine
    rng: random.Random
    decoding: list[Sequence] = field(default_factory=list)
    prefilling: Sequence | None = None

    def join(self, count: int) -> None:
        if count == 0:
            return
        self.decoding = [self._sequence(self.rng.randint(1, 90)) for _ in range(count - 1)]
        for sequence in self.decoding:
            self.engine.prefill(sequence)
        self.prefilling = self._sequence(1200)

    def _sequence(self, length: int) -> Sequence:
        return self.engine.sequence(prompt(length, self.rng.randint(1, 1000)), room=50)

    def parts(self) -> Iterator[tuple[Sequence, int]]:
        """Not all of them every time."""
        for sequence in self.decoding:
            if sequence.num_output_tokens < 48 and self.rng.random() < 0.9:
                yield sequence, 1
        if self.prefilling is not None and self.prefilling.num_output_tokens < 48:
            yield self.prefilling, min(self.rng.randint(1, 90), self.prefilling.num_remaining_tokens)


def warm_blocks(engine: Engine, ids: list[int], num_warm: int) -> list[int]:
    """Blocks of another request, which began alike and went on otherwise."""
    other = engine.sequence(ids[:num_warm] + prompt(30, 77))
    engine.prefill(other, 48)
    return other.block_ids[: num_warm // engine.paged_kv.layout.block_size]


def compute(engine: Engine, ids: list[int], way: Way, num_tokens: int = NUM_TOKENS) -> Bits:
    """The prompt and `num_tokens` − 1 tokens after it."""
    seed = hash((way.chunk, way.batch, way.num_warm)) % 10_000
    rng = random.Random(seed)
    fill_with_noise(engine, seed)
    engine.next_block = 1
    neighbours = Neighbours(engine, rng)
    neighbours.join(way.batch - 1)
    sequence = engine.sequence(ids, room=num_tokens)
    if way.num_warm:
        assert way.num_warm % engine.paged_kv.layout.block_size == 0
        shared = warm_blocks(engine, ids, way.num_warm)
        sequence.block_ids[: len(shared)] = shared
        sequence.num_computed_tokens = way.num_warm
    logits = []
    while sequence.num_output_tokens < num_tokens:
        parts = [*neighbours.parts(), (sequence, min(way.chunk or len(ids), sequence.num_remaining_tokens))]
        rng.shuffle(parts)
        sampling = [s for s, num in parts if num == s.num_remaining_tokens]
        found = engine.step(*parts)
        if sequence in sampling:
            logits.append(found[sampling.index(sequence)].copy())
    assert np.isfinite(logits).all()
    return Bits(engine.kv(sequence).clone(), np.array(logits), sequence.token_ids)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=ARITHMETICS if not why_not_here() else [])
def engines(request: pytest.FixtureRequest, tiny: Path) -> dict[int, Engine]:
    """By their number of threads."""
    return {n: native_engine(native_model(tiny, request.param, n), NUM_BLOCKS) for n in (1, 2)}


@pytest.fixture(scope="module")
def alone(engines: dict[int, Engine]) -> Bits:
    """The whole prompt at once, by itself, on one thread; then token by token."""
    return compute(engines[1], prompt(LENGTH), Way())


@needs_native
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_neighbours_and_chunks_change_no_bit(engines, alone, chunk, batch):
    assert same(compute(engines[1], prompt(LENGTH), Way(chunk, batch)), alone)


@needs_native
@pytest.mark.parametrize(("chunk", "batch"), [(16, 2), (64, 8), (100, 1), (512, 32), (None, 1)])
def test_threads_change_no_bit(engines, alone, chunk, batch):
    assert same(compute(engines[2], prompt(LENGTH), Way(chunk, batch)), alone)


@needs_native
@pytest.mark.parametrize("num_warm", [16, 64, 240, 528])
@pytest.mark.parametrize(("chunk", "batch", "threads"), [(None, 1, 1), (100, 8, 1), (64, 2, 2)])
def test_a_warm_prefix_changes_no_bit(engines, alone, num_warm, chunk, batch, threads):
    assert same(compute(engines[threads], prompt(LENGTH), Way(chunk, batch, num_warm)), alone)


@needs_native
@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_positions_that_were_decoded_are_computed_alike_as_a_prompt(engines, alone, chunk):
    """Recovery: prompt and output become a prompt. The other way round, a prompt goes token by token."""
    recovered = compute(engines[1], alone.token_ids[:-1], Way(chunk, 2), num_tokens=1)
    assert same(recovered, Bits(alone.kv, alone.logits[-1:], []))


@needs_native
@pytest.mark.parametrize("block_size", [2, 32, 48])
def test_the_block_size_changes_no_bit(engines, alone, block_size):
    """A block of two is not read as larger ones are, except where attention rounds to bf16."""
    model = engines[1].model.model
    if block_size == 2 and model.numerics_version.endswith("bf16-attention"):
        pytest.skip("block sizes that are no multiple of 16 are computed in fp32")
    num_blocks = NUM_BLOCKS * 16 // block_size
    engine = native_engine(model, num_blocks, block_size)
    for way in (Way(None, 1), Way(100, 8), Way(64, 2, 96)):
        assert same(compute(engine, prompt(LENGTH), way), alone)


def test_the_comparison_can_fail(tiny):
    """The negative control: torch's products of as many rows as there are, not padded to four."""
    engine = build_engine(tiny, "float32", NUM_BLOCKS, kernels="torch")
    engine.model.model._kernels.row_multiple = 1
    expected = compute(engine, prompt(LENGTH), Way())
    assert same(compute(engine, prompt(LENGTH), Way()), expected)
    assert not same(compute(engine, prompt(LENGTH), Way(1)), expected)


@needs_native
def test_the_comparison_tells_arithmetics_apart(tiny):
    found = [
        compute(native_engine(native_model(tiny, name), NUM_BLOCKS), prompt(LENGTH), Way()) for name in ARITHMETICS
    ]
    assert found[0].logits.shape == found[1].logits.shape == (NUM_TOKENS, 300)
    assert not any(np.array_equal(one.logits, other.logits) for one, other in itertools.pairwise(found))


_CHILD = """
import sys
from pathlib import Path
from tests.engine.test_determinism import *
bits = compute(native_engine(native_model(Path(sys.argv[1]), "bfloat16", 2), NUM_BLOCKS), prompt(90), Way(64, 2))
np.save(sys.argv[2], bits.logits)
"""


@needs_native
def test_a_thread_that_openmp_withholds_changes_no_bit(tiny, tmp_path):
    expected = compute(native_engine(native_model(tiny, "bfloat16", 2), NUM_BLOCKS), prompt(90), Way(64, 2))
    environment = {**os.environ, "OMP_THREAD_LIMIT": "1", "PYTHONPATH": ".:kernels"}
    arguments = [sys.executable, "-c", _CHILD, str(tiny), str(tmp_path / "logits.npy")]
    subprocess.run(arguments, env=environment, check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "logits.npy"), expected.logits)


# --- the real model ---------------------------------------------------------------------------------------------------

_MANY = [
    *(Way(chunk, batch) for chunk in CHUNKS for batch in BATCHES),
    *(Way(64, 2, num_warm) for num_warm in (32, 224, 512)),
    Way(1),
]


def real_prompt(length: int) -> list[int]:
    return np.random.default_rng(5).integers(3, 49_000, length).tolist()


@needs_native
@pytest.mark.model
@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
def test_the_real_model_in_a_few_ways(smollm2, arithmetic):
    model = native_model(smollm2, arithmetic, threads=2)
    engine = native_engine(model, 160)
    use_threads(model, 1)
    expected = compute(engine, real_prompt(130), Way(), 4)
    for threads, way in ((1, Way(100, 4)), (2, Way(16, 2)), (1, Way(64, 1, 64))):
        use_threads(model, threads)
        assert same(compute(engine, real_prompt(130), way, 4), expected), way


@needs_native
@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_the_real_model_in_all_ways(smollm2, arithmetic):
    model = native_model(smollm2, arithmetic, threads=2)
    use_threads(model, 1)
    expected = compute(native_engine(model, NUM_BLOCKS), real_prompt(LENGTH), Way(), 6)
    for threads, block_size in ((1, 16), (2, 32)):
        use_threads(model, threads)
        engine = native_engine(model, NUM_BLOCKS * 16 // block_size, block_size)
        for way in _MANY:
            assert same(compute(engine, real_prompt(LENGTH), way, 6), expected), (way, threads, block_size)
