"""The forward pass against transformers, and its independence of batch, chunks and whatever lies in unwritten slots."""

import numpy as np
import pytest
import torch

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.engine.sequence import Chunk, ChunkResult, Sampled
from tests.support.engine_harness import Engine, build_engine
from tests.support.oracle import build_oracle, oracle_greedy, oracle_logits
from tests.support.tiny_models import TinyLlama, write_tiny_gguf, write_tiny_llama

SHAPES = [{}, {"tie": False, "bias": True, "num_heads": 8, "num_kv_heads": 2, "head_dim": 24, "num_layers": 3}]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


@pytest.fixture(scope="module", params=SHAPES, ids=["tied", "untied-biased"])
def checkpoint(request, tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), **request.param)


@pytest.fixture(scope="module")
def oracle(checkpoint):
    return build_oracle(checkpoint)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def tiny(request, tmp_path_factory):
    """A fresh engine each call, of one dtype."""
    source = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return lambda: build_engine(source, request.param)


@pytest.mark.parametrize("chunk_size", [None, 1, 16, 17, 64])
def test_prefill_logits_equal_transformers(checkpoint, oracle, chunk_size):
    ids = prompt(150)
    engine = build_engine(checkpoint)
    logits = engine.prefill(engine.sequence(ids), chunk_size)
    np.testing.assert_allclose(logits, oracle_logits(oracle, ids)[-1], atol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 255, 256, 257, 600])
def test_greedy_tokens_equal_transformers(checkpoint, oracle, length):
    ids = prompt(length, seed=length)
    assert build_engine(checkpoint).generate(ids, 24, chunk_size=64) == oracle_greedy(oracle, ids, 24)


@pytest.mark.parametrize("block_size", [1, 7, 300])
def test_any_block_size_works(checkpoint, oracle, block_size):
    ids = prompt(310)
    engine = build_engine(checkpoint, num_blocks=400, block_size=block_size)
    logits = engine.prefill(engine.sequence(ids, room=0), 100)
    np.testing.assert_allclose(logits, oracle_logits(oracle, ids)[-1], atol=1e-4)


def test_mixed_batch_equals_transformers(checkpoint, oracle):
    """Two decode rows of very different length, a chunk that goes on and one that starts, in one forward."""
    engine = build_engine(checkpoint)
    prompts = [prompt(n, seed=n) for n in (5, 300, 90, 40)]
    short, long, going_on, starting = (engine.sequence(ids) for ids in prompts)
    engine.prefill(short)
    engine.prefill(long)
    engine.step((going_on, 33))
    logits = engine.step((short, 1), (going_on, 57), (long, 1), (starting, 40))
    expected = [s.token_ids[:-1] for s in (short, going_on, long, starting)]
    for row, ids in zip(logits, expected, strict=True):
        np.testing.assert_allclose(row, oracle_logits(oracle, ids)[-1], atol=1e-4)


def test_a_chunk_that_does_not_sample_gives_none(tiny):
    engine: Engine = tiny()
    sequence, other = engine.sequence(prompt(40)), engine.sequence(prompt(9))
    going_on, whole = engine.runner.run([Chunk(sequence, 20, sample=False), Chunk(other, 9, sample=True)])
    assert going_on == ChunkResult()
    assert 0 <= whole.sampled.token_id < 300
    assert engine.runner.run([]) == []


def run_bits(engine: Engine, chunk_size: int | None, neighbours: int) -> tuple[np.ndarray, torch.Tensor]:
    """Last logits and KV of one prompt and 20 tokens after it, with `neighbours` in every batch."""
    ids = prompt(333)
    sequence = engine.sequence(ids)
    others = [engine.sequence(prompt(40 + 3 * n, seed=n), room=400) for n in range(neighbours)]
    for other in others:
        engine.prefill(other)
    size = chunk_size or len(ids)
    while sequence.num_output_tokens < 20:
        parts = [(other, 1) for other in others] + [(sequence, min(size, sequence.num_remaining_tokens))]
        logits = engine.step(*parts)
    return logits[-1], engine.kv(sequence).clone()


@pytest.mark.parametrize(("chunk_size", "neighbours"), [(16, 0), (100, 0), (332, 0), (1, 2), (64, 5), (None, 3)])
def test_bits_do_not_depend_on_chunks_or_neighbours(tiny, chunk_size, neighbours):
    whole_logits, whole_kv = run_bits(tiny(), None, 0)
    logits, kv = run_bits(tiny(), chunk_size, neighbours)
    np.testing.assert_array_equal(logits, whole_logits)
    assert torch.equal(kv, whole_kv)


def test_prefill_and_decode_compute_a_position_alike(tiny):
    """A sequence recovered by prefill of prompt and output has the bits that decoding gave it."""
    engine: Engine = tiny()
    decoded = engine.sequence(prompt(50))
    engine.prefill(decoded)
    while decoded.num_output_tokens < 30:
        logits = engine.step((decoded, 1))
    recovered = engine.sequence(decoded.token_ids[:-1])
    np.testing.assert_array_equal(engine.prefill(recovered, 64), logits[0])
    assert torch.equal(engine.kv(recovered), engine.kv(decoded))


@pytest.mark.parametrize("chunk_size", [16, 64, 512, None])
@pytest.mark.parametrize("length", [15, 16, 17, 63, 64, 65, 199])
def test_a_poisoned_pool_changes_nothing(tiny, chunk_size, length):
    """FIELD_CASES G03: only written slots take part, prompt and decode, whatever the chunk."""
    clean, poisoned = tiny(), tiny()
    poisoned.paged_kv.pool.fill_(float("nan"))
    ids = prompt(length)
    first, second = clean.sequence(ids), poisoned.sequence(ids)
    np.testing.assert_array_equal(clean.prefill(first), poisoned.prefill(second, chunk_size))
    for _ in range(8):
        np.testing.assert_array_equal(clean.step((first, 1)), poisoned.step((second, 1)))
    assert first.token_ids == second.token_ids


def test_a_poisoned_page_of_its_own_is_noticed(tiny):
    """The negative control: a NaN in a written slot does reach the logits, and is answered by no token."""
    engine: Engine = tiny()
    sequence = engine.sequence(prompt(20))
    engine.prefill(sequence)
    engine.paged_kv.pool[sequence.block_ids[0]] = float("nan")
    (result,) = engine.runner.run([Chunk(sequence, 1, sample=True)])
    assert result == ChunkResult(Sampled(None))


def test_warm_up_leaves_results_alone(tiny):
    cold, warm = tiny(), tiny()
    warm.runner.warm_up(64)
    assert cold.generate(prompt(30), 10) == warm.generate(prompt(30), 10)


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_gguf_computes_as_transformers_on_the_same_weights(tmp_path, quant):
    source = write_tiny_gguf(tmp_path / "tiny.gguf", quant, tie=False)
    ids = prompt(70)
    engine = build_engine(source)
    logits = engine.prefill(engine.sequence(ids), 32)
    np.testing.assert_allclose(logits, oracle_logits(build_oracle(source), ids)[-1], atol=1e-4)


def test_gguf_and_safetensors_of_one_model_agree_bit_for_bit(tmp_path):
    plain = build_engine(write_tiny_llama(tmp_path / "hf"))
    packed = build_engine(write_tiny_gguf(tmp_path / "tiny.gguf"))
    ids = prompt(40)
    np.testing.assert_array_equal(plain.prefill(plain.sequence(ids)), packed.prefill(packed.sequence(ids)))


def test_bad_chunks_are_refused_before_anything_runs(tiny):
    engine: Engine = tiny()
    before = engine.paged_kv.pool.clone()
    good = engine.sequence(prompt(20))
    short = engine.sequence(prompt(20))
    short.block_ids = short.block_ids[:1]
    foreign = engine.sequence([5, TinyLlama().vocab_size])
    for bad, reason in (
        (Chunk(short, 20, sample=True), ErrorReason.INTERNAL),
        (Chunk(good, 21, sample=True), ErrorReason.INTERNAL),
        (Chunk(good, 0, sample=False), ErrorReason.INTERNAL),
        (Chunk(good, 5, sample=True), ErrorReason.INTERNAL),
        (Chunk(foreign, 2, sample=True), ErrorReason.INVALID_ARGUMENT),
    ):
        with pytest.raises(PdserveError) as caught:
            engine.runner.run([Chunk(good, 20, sample=True), bad])
        assert caught.value.reason is reason
    assert torch.equal(engine.paged_kv.pool, before)
