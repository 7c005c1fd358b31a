"""`python -m pdserve_bench.peer`: compares our server with another, cell by cell, and says which targets are met."""

import os
import signal
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pdserve_bench.conditions import conditions
from pdserve_bench.peer.cells import CELLS, MIN_RATIO, MIN_RATIO_BFLOAT16, Cell, Comparison, Sample, targets, typical
from pdserve_bench.peer.client import ServerError
from pdserve_bench.peer.measure import Effort, RandomPrompts, compare
from pdserve_bench.peer.server import Gone, ServerSpec, running
from pdserve_bench.report import new_table, noise_mark, result, targets_table, write_result

COMMAND_OR_URL = "command line that starts it, or the URL of one that runs, as in http://127.0.0.1:8000"

LOGS = Path(tempfile.gettempdir())


def main(  # noqa: PLR0913 - one parameter is one flag
    *,
    ours: Annotated[str, typer.Option(help=f"Our server: {COMMAND_OR_URL}.")],
    peer: Annotated[str, typer.Option(help=f"The other server: {COMMAND_OR_URL}.")],
    ours_url: Annotated[str, typer.Option(help="Where ours answers, if it is a command.")] = "http://127.0.0.1:8000",
    peer_url: Annotated[str, typer.Option(help="Where the peer answers, if a command.")] = "http://127.0.0.1:8100",
    ours_pid: Annotated[int, typer.Option(help="Ours, if it is a URL: the process above all its others.")] = 0,
    peer_pid: Annotated[int, typer.Option(help="The peer's, if it is a URL.")] = 0,
    cores: Annotated[str, typer.Option(help="As in 0,1: for both servers and the client; default: all here.")] = "",
    cells: Annotated[str, typer.Option(help="Some cells only, as in 'decode c8,prefill 512'.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Of every cell, on both servers in turns.")] = 5,
    max_tries: Annotated[int, typer.Option(min=1, help="Of a measurement that others disturb.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
    vocab_size: Annotated[int, typer.Option(help="Prompts are random ids below it.")] = 49152,
    bfloat16_attention: Annotated[bool, typer.Option(help="Hold prefill to that option's targets.")] = False,
    logs: Annotated[Path, typer.Option(help="Folder for the servers' logs.")] = LOGS,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
) -> None:
    """Compare two servers of one model on the same cores. Start both with prefix caching off and as many threads."""
    console = Console()
    signal.signal(signal.SIGTERM, _exit)
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    chosen, effort = _chosen(cells), Effort(repeats, max_tries)
    specs = _spec("ours", ours, ours_url, ours_pid), _spec("peer", peer, peer_url, peer_pid)

    def note(server: str, cell: Cell, sample: Sample) -> None:
        noise = noise_mark(sample.foreign_cores)
        console.print(f"{cell.name:13} {server}: {sample.rate:8.1f} {cell.unit}{noise}", highlight=False)

    with ExitStack() as stack:
        servers = [stack.enter_context(running(spec, logs / f"{spec.name}.log")) for spec in specs]
        described = {server.spec.name: server.describe() for server in servers}
        prompts = RandomPrompts(seed, vocab_size)
        comparisons = compare(servers[0], servers[1], chosen, effort, prompts, note)
    found = targets(comparisons, MIN_RATIO_BFLOAT16 if bfloat16_attention else MIN_RATIO)
    console.print(comparison_table(comparisons), targets_table(found), sep="\n\n")
    if json_file is not None:
        settings = {**described, **asdict(effort), "vocab_size": vocab_size, "bfloat16_attention": bfloat16_attention}
        about = conditions(settings, {"prompts": seed}, max(one.foreign_cores for one in comparisons))
        measured = {"cells": [one.to_json() for one in comparisons]}
        write_result(json_file, result("peer", about, measured, found))


def _exit(number: int, _: FrameType | None) -> None:
    """As an exception, so that the servers are ended."""
    sys.exit(128 + number)


def _spec(name: str, command_or_url: str, url: str, pid: int) -> ServerSpec:
    if command_or_url.startswith("http://"):
        if not pid:
            raise typer.BadParameter(f"a URL needs --{name}-pid, to freeze that server in the other's turn")
        return ServerSpec(name, "", command_or_url.rstrip("/"), pid)
    return ServerSpec(name, command_or_url, url.rstrip("/"))


def _chosen(names: str) -> list[Cell]:
    known = {cell.name: cell for cell in CELLS}
    chosen = [name.strip() for name in names.split(",")] if names else list(known)
    if unknown := set(chosen) - known.keys():
        raise typer.BadParameter(f"no such cell: {', '.join(unknown)}; there are: {', '.join(known)}")
    return [known[name] for name in chosen]


def comparison_table(comparisons: list[Comparison]) -> Table:
    """One row a cell: medians over the repeats, ours/peer, and the ratio's range, in 80 columns. "client": the most
    cores that the client took."""
    numbers = ("ours", "peer", "ratio", "range", "TTFT ms", "ITL ms", "client")
    table = new_table("Ours and the peer: medians, tokens/s of output or prompt", ("cell",), numbers)
    for one in comparisons:
        both = typical(one.ours), typical(one.peer)
        table.add_row(
            one.cell.name,
            *(f"{side.rate:,.1f}" for side in both),
            f"{one.ratio:.2f}",
            f"{min(one.ratios):.2f}–{max(one.ratios):.2f}",
            "/".join(f"{side.ttft_ms:.0f}" for side in both),
            "/".join("–" if side.itl_ms is None else f"{side.itl_ms:.1f}" for side in both),
            f"{max(side.client_cores for side in both):.2f}",
        )
    return table


if __name__ == "__main__":
    try:
        typer.run(main)
    except* (ServerError, Gone) as errors:
        sys.exit(f"peer: {errors.exceptions[0]}")
