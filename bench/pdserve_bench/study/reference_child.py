"""The engine alone, for `reference`: a line of JSON in, `[token ids, max_tokens]`, a line out, the output's token ids.

argv: the model's files, dtype, block size, and the most tokens that a request has.
"""

import json
import sys
from pathlib import Path

from pdserve.core.ids import SequenceId
from pdserve.core.reservation import blocks_for_tokens
from pdserve.core.sampling import SamplingParams
from pdserve.engine.loading import EngineConfig, LoadedEngine, load_engine
from pdserve.engine.memory import MemoryLimits
from pdserve.engine.sequence import Sequence
from pdserve_bench.engine.sequences import run_prompt, run_step

_CHUNK = 512


def output(engine: LoadedEngine, token_ids: list[int], max_tokens: int) -> list[int]:
    """Greedy, and deaf to end tokens, as the load generator's requests are."""
    num_blocks = blocks_for_tokens(len(token_ids) + max_tokens, engine.paged_kv.layout.block_size)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    sequence = Sequence(SequenceId(1, 1), list(token_ids), len(token_ids), sampling, list(range(num_blocks)))
    run_prompt(engine, sequence, _CHUNK)
    sequence.num_computed_tokens -= 1  # the last row again, now for its token
    while sequence.num_output_tokens < max_tokens:
        run_step(engine, [sequence])
    return sequence.token_ids[len(token_ids) :]


def main() -> None:
    source, dtype, block_size, max_tokens = sys.argv[1:]
    num_blocks = blocks_for_tokens(int(max_tokens), int(block_size))
    config = EngineConfig(
        Path(source), "reference", dtype=dtype, block_size=int(block_size), memory=MemoryLimits(num_blocks=num_blocks)
    )
    engine = load_engine(config)
    for line in sys.stdin:
        token_ids, wanted = json.loads(line)
        sys.stdout.write(json.dumps(output(engine, token_ids, wanted)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
