"""`pdserve bench serve` and `bench capacity` from checked options to an exit code: runs, shows and writes.

All raise RequestError where nobody answers or a warm-up request fails, CannotMeasureError where the run turns out to be
none, and OSError where a file cannot be written.
"""

import asyncio
from dataclasses import asdict
from pathlib import Path

from pdserve_bench.load.plan import LoadPlan
from pdserve_bench.serve.capacity import Capacity, Grid, Store, sweep
from pdserve_bench.serve.cell_file import CellFile
from pdserve_bench.serve.cell_run import CellOptions, measure_cell
from pdserve_bench.serve.cells import Cell, Load, Objectives
from pdserve_bench.serve.files import Outputs, VllmFile, capacity_told, told
from pdserve_bench.serve.options import ServerOptions
from pdserve_bench.serve.run import Search, Served, ServeOptions, serve_once, serve_search
from pdserve_bench.serve.search import Found, Trial
from pdserve_bench.serve.session import opened
from pdserve_bench.serve.tables import capacity_table, search_table
from pdserve_bench.serve.terminal import Terminal
from pdserve_bench.serve.verdict import EXIT_CACHED, EXIT_FAILURES, EXIT_INTERRUPTED, FRESH_MARGIN


def serve(
    server: ServerOptions,
    options: ServeOptions,
    plan: LoadPlan,
    outputs: Outputs,
    vllm_file: VllmFile | None,
    terminal: Terminal,
) -> int:
    """One run; the exit code is its verdict's."""
    terminal.seed(options.seed)

    async def go() -> tuple[Served, str]:
        with terminal.progress() as show:
            async with opened(server, show) as session:
                return await serve_once(session, options, plan), session.model

    served, model = asyncio.run(go())
    terminal.served(served)
    outputs.write_served(served, options.slo)
    if vllm_file is not None:
        terminal.note(f"written: {vllm_file.write(served, model)}")
    terminal.verdict(served.verdict)
    return served.verdict.exit_code


def serve_searched(
    server: ServerOptions, options: ServeOptions, asked: Search, outputs: Outputs, terminal: Terminal
) -> int:
    """A search. Requests that fail of overload are what it looks for, and no fault; a measured cache is one."""
    terminal.seed(options.seed)

    def note(trial: Trial, served: Served) -> None:
        passed = "passed" if trial.passed else "did not pass"
        terminal.err.print(f"{served.run.name}: goodput {trial.goodput:.1%}, {passed}")
        for message in served.limits_told:
            terminal.note(message)
        if served.cache.too_high:
            terminal.fault(f"{served.run.name}: the prefix cache was measured: hit rate {served.cache}")

    async def go() -> tuple[Found, list[Served]]:
        with terminal.progress() as show:
            async with opened(server, show) as session:
                return await serve_search(session, options, asked, note)

    found, runs = asyncio.run(go())
    terminal.print_whole(search_table(found, runs))
    for message in found.inconsistencies:
        terminal.note(message)
    terminal.out.print(told(found))
    outputs.write_found(found, runs, options.slo)
    if found.interrupted:
        return EXIT_INTERRUPTED
    if not options.tolerance.allow_cached and any(served.cache.too_high for served in runs):
        return EXIT_CACHED
    return EXIT_FAILURES if found.rate is None else 0


def capacity(  # noqa: PLR0917 - what makes up a sweep
    server: ServerOptions,
    grid: Grid,
    objectives: Objectives,
    options: CellOptions,
    cells: Path | None,
    outputs: Outputs,
    terminal: Terminal,
) -> int:
    """A sweep; cells that the file `cells` holds are not measured again, and new ones are added."""
    terminal.seed(options.seed)

    def note(cell: Cell) -> None:
        missed = "; ".join(objectives.missed(cell)) or "meets every objective"
        terminal.err.print(f"{cell.load.name}: {missed}")
        if _is_cached(cell):
            terminal.fault(f"{cell.load.name}: the prefix cache was measured: hit rate {cell.cached_share:.1%}")

    async def go() -> Capacity:
        with terminal.progress() as show:
            async with opened(server, show) as session:
                model = server.model or session.model
                store: Store = {} if cells is None else CellFile(cells, _settings(options, model))

                async def measure(load: Load) -> Cell | None:
                    return await measure_cell(session, options, load)

                return await sweep(grid, objectives, measure, store, note)

    found = asyncio.run(go())
    terminal.print_whole(capacity_table(found))
    terminal.out.print(capacity_told(found))
    outputs.write_capacity(found)
    if found.interrupted:
        return EXIT_INTERRUPTED
    if any(_is_cached(cell) for cell in found.cells):
        return EXIT_CACHED
    return EXIT_FAILURES if found.safe_point is None else 0


def _is_cached(cell: Cell) -> bool:
    """Every prompt of a sweep is fresh."""
    return cell.cached_share is not None and cell.cached_share > FRESH_MARGIN


def _settings(options: CellOptions, model: str) -> dict[str, object]:
    """What cells depend on; not the seed, with which prompts only must differ from one run to the next."""
    chosen = asdict(options)
    del chosen["seed"]
    return {"model": model, **chosen}
