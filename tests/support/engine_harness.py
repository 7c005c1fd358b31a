"""Drives a runner the way a scheduler would, one sequence or several, for tests."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from pdserve.core.ids import SequenceId
from pdserve.core.model_files import ModelConfig, open_model_files
from pdserve.core.model_info import KvLayout
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import SamplingParams
from pdserve.engine.model.choice import KernelChoice, ModelOptions, empty_model
from pdserve.engine.model.interface import Model, StepInput
from pdserve.engine.paged_kv import TORCH_DTYPES, PagedKv
from pdserve.engine.runner import ModelRunner
from pdserve.engine.sequence import Chunk, ChunkResult, Sequence
from pdserve.engine.weights import load_weights

MAX_ROWS = 1600
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)


class SpyModel:
    """A model that keeps the logits it gave last, and lets a test change them first (`alter(logits, rows)`)."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.last = np.zeros((0, 0), dtype=np.float32)
        self.num_rows: list[int] = []
        self.alter: Callable[[np.ndarray, list[int]], None] = lambda logits, rows: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, step: StepInput, kv_pool: torch.Tensor) -> np.ndarray:
        self.last = self._altered(self.model.forward(step, kv_pool), step.sample_rows)
        return self.last

    def logits(self, rows: np.ndarray) -> np.ndarray:
        return self._altered(self.model.logits(rows), rows)

    def _altered(self, logits: np.ndarray, rows: np.ndarray) -> np.ndarray:
        if len(rows) == 0:
            return logits
        altered = logits.copy()
        self.alter(altered, rows.tolist())
        self.num_rows.append(len(rows))
        return altered


@dataclass
class Engine:
    runner: ModelRunner
    model: SpyModel
    paged_kv: PagedKv
    config: ModelConfig
    next_block: int = 1
    results: list[ChunkResult] = field(default_factory=list)

    def sequence(self, token_ids: Seq[int], sampling: SamplingParams = GREEDY, room: int = 64) -> Sequence:
        """A new sequence with blocks for `room` more tokens; blocks are handed out in falling order, with gaps."""
        ids = list(token_ids)
        count = blocks_for_tokens(len(ids) + room, self.paged_kv.layout.block_size)
        blocks = list(range(self.next_block, self.next_block + count))[::-1]
        self.next_block += count + 1
        assert self.next_block <= self.paged_kv.num_blocks, "the test's pool is too small"
        return Sequence(SequenceId(1, self.next_block), ids, len(ids), sampling, blocks)

    def step(self, *parts: tuple[Sequence, int]) -> np.ndarray:
        """Run (sequence, number of tokens) chunks in one forward; logits of those that reach their end."""
        chunks = [Chunk(s, n, sample=s.num_computed_tokens + n == s.num_tokens) for s, n in parts]
        self.results = self.runner.run(chunks)
        for chunk, result in zip(chunks, self.results, strict=True):
            chunk.sequence.num_computed_tokens += chunk.num_tokens
            if result.sampled is not None and result.sampled.token_id is not None:
                chunk.sequence.token_ids.append(result.sampled.token_id)
        return self.model.last

    def prefill(self, sequence: Sequence, chunk_size: int | None = None) -> np.ndarray:
        """Compute what remains in chunks; the logits of the last position."""
        size = chunk_size or sequence.num_remaining_tokens
        logits = np.empty(0)
        while sequence.num_tokens == sequence.num_prompt_tokens:
            logits = self.step((sequence, min(size, sequence.num_remaining_tokens)))
        return logits[0]

    def generate(self, prompt: Seq[int], num_tokens: int, chunk_size: int | None = None) -> list[int]:
        sequence = self.sequence(prompt, room=num_tokens)
        self.prefill(sequence, chunk_size)
        while sequence.num_output_tokens < num_tokens:
            self.step((sequence, 1))
        return sequence.token_ids[len(prompt) :]

    def kv(self, sequence: Sequence) -> torch.Tensor:
        """The written KV of a sequence: [tokens, layers, 2, heads, head_dim]."""
        blocks = slots_and_dims(self.paged_kv)[sequence.block_ids]
        by_slot = blocks.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)
        return by_slot[: sequence.num_computed_tokens]


def slots_and_dims(paged_kv: PagedKv) -> torch.Tensor:
    """The pool in the inner order "slot_dim", whatever its own is; a copy unless it is that."""
    pool, layout = paged_kv.pool, paged_kv.layout
    if layout.inner_order == "slot_dim":
        return pool
    size, dim = layout.block_size, layout.head_dim
    width = 4 // pool.element_size()
    pages = pool.flatten(-2)
    keys = pages[:, :, 0].unflatten(-1, (dim // width, size, width)).transpose(-3, -2).flatten(-2)
    values = pages[:, :, 1].unflatten(-1, (size // width, dim, width)).transpose(-2, -1).flatten(-3, -2)
    return torch.stack((keys, values), dim=2)


def spy_on(runner: ModelRunner) -> SpyModel:
    """From now on the runner's model is one."""
    spy = SpyModel(runner._model)
    runner._model = cast("Model", spy)
    return spy


def load_model(source: Path, dtype: str, block_size: int, kernels: KernelChoice = "auto") -> Model:
    files = open_model_files(source)
    options = ModelOptions(TORCH_DTYPES[dtype], torch.device("cpu"), block_size, MAX_ROWS, MAX_ROWS, kernels)
    model = empty_model(files.config, options)
    load_weights(files, model)
    return model


def build_pool(model: Model, dtype: str, num_blocks: int, block_size: int) -> PagedKv:
    config, order = model.config, model.kv_inner_order
    layout = KvLayout(dtype, block_size, config.num_layers, config.num_kv_heads, config.head_dim, inner_order=order)
    return PagedKv(layout, num_blocks, torch.device("cpu"))


def build_engine(
    source: Path,
    dtype: str = "float32",
    num_blocks: int = 512,
    block_size: int = 16,
    kernels: KernelChoice = "auto",
) -> Engine:
    model = load_model(source, dtype, block_size, kernels)
    paged_kv = build_pool(model, dtype, num_blocks, block_size)
    spy = SpyModel(model)
    return Engine(ModelRunner(cast("Model", spy), paged_kv), spy, paged_kv, model.config)
