"""Drives a runner the way a scheduler would, one sequence or several, for tests."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from pdserve.core.ids import SequenceId
from pdserve.core.model_files import ModelConfig, open_model_files
from pdserve.core.model_info import KvLayout
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import SamplingParams
from pdserve.engine.model.decoder import DecoderModel
from pdserve.engine.paged_kv import TORCH_DTYPES, PagedKv
from pdserve.engine.runner import ModelRunner
from pdserve.engine.sequence import Chunk, ChunkResult, Sequence
from pdserve.engine.weights import load_weights
from pdserve_kernels.torch_reference import TorchKernels

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)


class RecordingRunner(ModelRunner):
    """Keeps the logits that each call's sampling chunks were drawn from, in their order."""

    logits: np.ndarray

    def _sampled_logits(self, chunks: Seq[Chunk], hidden: torch.Tensor) -> np.ndarray:
        self.logits = super()._sampled_logits(chunks, hidden)
        return self.logits


@dataclass
class Engine:
    runner: RecordingRunner
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
        return self.runner.logits

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
        blocks = self.paged_kv.pool[sequence.block_ids]
        by_slot = blocks.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)
        return by_slot[: sequence.num_computed_tokens]


def build_engine(source: Path, dtype: str = "float32", num_blocks: int = 512, block_size: int = 16) -> Engine:
    files = open_model_files(source)
    config, kernels = files.config, TorchKernels()
    model = DecoderModel(config, TORCH_DTYPES[dtype], torch.device("cpu"), kernels)
    load_weights(files, model)
    layout = KvLayout(dtype, block_size, config.num_layers, config.num_kv_heads, config.head_dim)
    paged_kv = PagedKv(layout, num_blocks, torch.device("cpu"))
    return Engine(RecordingRunner(model, kernels, paged_kv), paged_kv, config)
