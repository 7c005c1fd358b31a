"""`python -m pdserve_bench.prefix_replay`: hit rates of the workers' own prefix index on a trace of real prompts.

Several pool sizes, each beside an ideal LRU of the same size. No model runs; with `--ttft URL` what a hit is worth is
measured on a fleet that runs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pdserve_bench.conditions import conditions
from pdserve_bench.prefix_trace import Replay, read_trace, replay
from pdserve_bench.prefix_ttft import measure_ttft, ttft_table
from pdserve_bench.report import new_table, result, targets_table, write_result
from pdserve_bench.targets import Target

SAMPLE = Path(__file__).parent / "data" / "mooncake_conversation_head.jsonl"
BLOCK_SIZE = 16
"""A block of the trace becomes one KV block: lengths are divided by 32, which leaves the longest 3,944 tokens."""

MIN_RATIO = 0.95


def replay_table(replays: Sequence[Replay]) -> Table:
    table = new_table("Prefix hits on the trace", (), ("blocks", "tokens", "hit rate", "ideal LRU", "ratio"))
    for one in replays:
        rates = f"{one.index.rate:.4f}", f"{one.ideal.rate:.4f}", f"{one.ratio:.4f}"
        table.add_row(f"{one.num_blocks:,}", f"{one.num_blocks * BLOCK_SIZE:,}", *rates)
    return table


def targets_of(replays: Sequence[Replay]) -> list[Target]:
    """Counts, which no other process can disturb."""
    return [
        Target(f"prefix hit rate of an ideal LRU's, {one.num_blocks} blocks", "ratio", ">=", one.ratio, MIN_RATIO, 0.0)
        for one in replays
    ]


def main(
    *,
    trace: Annotated[Path, typer.Option(help="JSON lines with input_length and hash_ids.")] = SAMPLE,
    blocks: Annotated[str, typer.Option(help="Pool sizes.")] = "512,1024,2048,4096,8192,16384,65536,262144",
    in_flight: Annotated[int, typer.Option(help="Prompts in the pool at a time, if it has room.")] = 8,
    ttft: Annotated[str, typer.Option("--ttft", help="URL of a running fleet: measure what a hit saves.")] = "",
    lengths: Annotated[str, typer.Option(help="Prompt tokens, for --ttft.")] = "512,2048",
    repeats: Annotated[int, typer.Option(help="Pairs of prompts for each length, for --ttft.")] = 15,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
) -> None:
    """Hit rates of the prefix index against an ideal LRU, and with --ttft the time that a hit saves."""
    console = Console()
    prompts = read_trace(trace, BLOCK_SIZE)
    replays = [replay(prompts, int(num_blocks), BLOCK_SIZE, in_flight) for num_blocks in blocks.split(",")]
    gains = [measure_ttft(ttft, int(length), repeats) for length in lengths.split(",")] if ttft else []
    console.print(replay_table(replays))
    if gains:
        console.print(ttft_table(gains))
    targets = targets_of(replays)
    console.print(targets_table(targets))
    if json_file is not None:
        settings = {"trace": trace.name, "num_prompts": len(prompts), "in_flight": in_flight, "repeats": repeats}
        measured = {"replays": [one.to_json() for one in replays], "ttft": [gain.to_json() for gain in gains]}
        document = result("prefix_replay", conditions(settings, {}, 0.0), measured, targets)
        write_result(json_file, document)
    if not all(target.met for target in targets):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
