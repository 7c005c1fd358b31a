"""Scores texts by the engine's own path: `load_engine`, then prompts with logprobs in chunks, as a worker runs them."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pdserve.core.ids import SequenceId
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import SamplingParams, TokenLogprobs
from pdserve.engine.interfaces import Runner
from pdserve.engine.loading import EngineConfig, load_engine
from pdserve.engine.memory import MemoryLimits
from pdserve.engine.sequence import Chunk, Sequence
from pdserve_bench.quality.scores import Measurement, SliceScore

CHUNK_TOKENS = 512
_BLOCK_SIZE = 16
_SCORED = SamplingParams(max_tokens=1, temperature=0.0, num_prompt_logprobs=1)


@dataclass(frozen=True, slots=True)
class Configuration:
    """What an operator sets and what changes the numbers that come out."""

    label: str
    dtype: str
    attention_precision: Literal["float32", "bfloat16"] = "float32"


def score_engine(source: Path, configuration: Configuration, slices: Mapping[str, Seq[int]]) -> Measurement:
    """Load the model as a worker does and score each slice, given as token ids, with nothing before it.

    Raises:
        PdserveError: the model cannot be loaded, or a slice is longer than its context.
        ValueError: a logit is no number.
    """
    num_blocks = max(blocks_for_tokens(len(token_ids), _BLOCK_SIZE) for token_ids in slices.values())
    config = EngineConfig(
        source=source,
        name=source.stem,
        dtype=configuration.dtype,
        attention_precision=configuration.attention_precision,
        block_size=_BLOCK_SIZE,
        memory=MemoryLimits(num_blocks=num_blocks),
        max_step_tokens=CHUNK_TOKENS,
    )
    loaded = load_engine(config)
    scores = tuple(_score(loaded.runner, name, token_ids) for name, token_ids in slices.items())
    return Measurement(configuration.label, loaded.model_info.evaluation_id, scores)


def _score(runner: Runner, name: str, token_ids: Seq[int]) -> SliceScore:
    blocks = list(range(blocks_for_tokens(len(token_ids), _BLOCK_SIZE)))
    sequence = Sequence(SequenceId(0, 0), list(token_ids), len(token_ids), _SCORED, blocks)
    found: list[TokenLogprobs] = []
    while sequence.num_remaining_tokens:
        num_tokens = min(CHUNK_TOKENS, sequence.num_remaining_tokens)
        (result,) = runner.run([Chunk(sequence, num_tokens, sample=False)])
        found += result.prompt_logprobs
        sequence.num_computed_tokens += num_tokens
    if len(found) != len(token_ids) - 1:
        raise ValueError(f"{name}: {len(found)} of {len(token_ids) - 1} tokens were scored; a logit was no number")
    return SliceScore(name, -sum(entry.logprob for entry in found), tuple(entry.top[0][0] for entry in found))
