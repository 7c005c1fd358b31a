import json
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_bench.prefix_replay import BLOCK_SIZE, MIN_RATIO, SAMPLE, targets_of
from pdserve_bench.prefix_trace import (
    TRACE_BLOCK,
    HitRate,
    IndexReplay,
    Replay,
    TracedPrompt,
    read_trace,
    replay,
    replay_ideal,
)

BLOCK = 4


def prompt(*names: int, tail: int = 1) -> TracedPrompt:
    """Blocks of those names, the last with `tail` tokens."""
    return TracedPrompt((len(names) - 1) * BLOCK + tail, names)


@pytest.mark.parametrize("num_blocks", [256, 4096, 8192, 65536])
def test_the_index_finds_what_an_ideal_lru_finds(num_blocks: int) -> None:
    """On real conversations, with a pool that forgets nearly everything and with one that forgets nothing."""
    prompts = read_trace(SAMPLE, BLOCK_SIZE)
    found = replay(prompts, num_blocks, BLOCK_SIZE, max_in_flight=8)
    assert found.ideal.hits > 0
    assert found.ratio >= MIN_RATIO
    assert found.index.queries == found.ideal.queries == sum(one.num_tokens for one in prompts)


def test_a_larger_pool_finds_more() -> None:
    prompts = read_trace(SAMPLE, BLOCK_SIZE)
    rates = [replay_ideal(prompts, num_blocks, BLOCK_SIZE).rate for num_blocks in (512, 4096, 16384)]
    assert rates == sorted(set(rates))


def test_lengths_shrink_with_the_blocks(tmp_path: Path) -> None:
    rows = [(1, 1), (TRACE_BLOCK, 1), (TRACE_BLOCK + 1, 2), (3 * TRACE_BLOCK - 1, 3)]
    lines = [json.dumps({"input_length": length, "hash_ids": list(range(blocks))}) for length, blocks in rows]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    prompts = read_trace(tmp_path / "trace.jsonl", BLOCK)
    assert [one.num_tokens for one in prompts] == [1, BLOCK, BLOCK + 1, 3 * BLOCK]
    assert prompts[2].token_ids(BLOCK) == [0] * BLOCK + [1]


def test_the_ideal_lru_by_hand() -> None:
    """Room for two blocks: 1 and 2, then 3 puts out 2, the one used longest ago."""
    prompts = [prompt(1, 2, 9), prompt(3, 9), prompt(1, 2, 9), prompt(1, 2, 9)]
    assert replay_ideal(prompts, 2, BLOCK) == HitRate(sum(one.num_tokens for one in prompts), (0 + 0 + 1 + 2) * BLOCK)


def test_the_last_token_and_partial_blocks_are_never_found() -> None:
    whole, partial = prompt(1, 2, tail=BLOCK), prompt(1, 2, tail=BLOCK - 1)
    for one, num_found in ((whole, 1), (partial, 1), (prompt(1, 2, 3, tail=1), 2)):
        first = TracedPrompt(3 * BLOCK, (1, 2, 3))
        for hits in (replay_ideal([first, one], 8, BLOCK).hits, IndexReplay(8, BLOCK, 1).run([first, one]).hits):
            assert hits == num_found * BLOCK


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=30),
    st.integers(6, 12),
    st.integers(1, 4),
)
def test_one_at_a_time_the_index_is_an_ideal_lru_but_for_the_partial_block(
    paths: list[list[int]], num_blocks: int, max_in_flight: int
) -> None:
    """Names of blocks tell their whole prefix, as in the trace."""
    prompts = [prompt(*accumulate(path, lambda name, step: 5 * name + step, initial=1)) for path in paths]
    ideal = replay_ideal(prompts, num_blocks, BLOCK)
    assert IndexReplay(num_blocks, BLOCK, 1).run(prompts).hits <= ideal.hits
    assert IndexReplay(num_blocks + 1, BLOCK, 1).run(prompts).hits >= ideal.hits
    IndexReplay(num_blocks, BLOCK, max_in_flight).run(prompts)


def test_nothing_to_find_is_no_failure_and_half_is_one() -> None:
    nothing = Replay(8, HitRate(100, 0), HitRate(100, 0))
    half = Replay(8, HitRate(100, 20), HitRate(100, 40))
    assert [target.met for target in targets_of([nothing, half])] == [True, False]
    assert half.ratio == 0.5


def test_the_command_writes_a_result(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    arguments = ["--blocks", "1024,8192", "--json", str(path)]
    subprocess.run([sys.executable, "-m", "pdserve_bench.prefix_replay", *arguments], check=True, timeout=120)
    document = json.loads(path.read_text())
    assert [one["num_blocks"] for one in document["replays"]] == [1024, 8192]
    assert all(target["met"] for target in document["targets"])
    assert document["conditions"]["settings"]["trace"] == SAMPLE.name
