"""Finds the colocated fleet that the disaggregated one is held against: every candidate once, under the same load."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pdserve_bench.compare.candidates import Candidate, Choice, best, candidates
from pdserve_bench.compare.fleets import FleetSpec, colocated, started
from pdserve_bench.compare.measure import CompareOptions, Measurer
from pdserve_bench.compare.schedule import Cell
from pdserve_bench.compare.store import Store
from pdserve_bench.load.records import RunResult
from pdserve_bench.measures.summarise import summarise
from pdserve_bench.measures.summary import Summary
from pdserve_bench.study.options import StudyOptions


@dataclass(frozen=True, slots=True)
class Pilot:
    """`runs`: by candidate, in the order in which they were measured."""

    choice: Choice
    runs: dict[Candidate, tuple[RunResult, Summary]]


def colocated_spec(candidate: Candidate, options: StudyOptions) -> FleetSpec:
    spec = colocated(
        candidate.num_workers,
        candidate.num_threads,
        candidate.chunk,
        cores=options.cores,
        num_blocks=options.num_blocks,
        extra=options.serve_flags,
    )
    return replace(spec, protocol=options.protocol)


def run_pilot(
    options: StudyOptions,
    compare_options: CompareOptions,
    note: Callable[[Candidate, Summary], None],
) -> Pilot:
    """Each is started, measured and ended before the next.

    Raises:
        Gone, ServerError: one does not start, or answers nothing.
        KeyboardInterrupt: Ctrl-C; what was measured is in the store.
    """
    store, plan = Store(options.folder / "pilot"), options.pilot_plan()
    runs: dict[Candidate, tuple[RunResult, Summary]] = {}
    for candidate in candidates(options.chunks, len(options.cores)):
        with (
            started([colocated_spec(candidate, options)], _logs(options.folder)) as (fleet,),
            asyncio.Runner() as runner,
        ):
            measurer = Measurer([fleet], compare_options, runner)
            cell = Cell(max(options.rate_factors), 0, fleet.spec.name)
            digest = measurer.digest(fleet, plan)
            run = store.get_or_run(cell.key, digest, partial(measurer.measure, fleet, plan, cell))
        if run.interrupted:
            raise KeyboardInterrupt
        runs[candidate] = run, summarise(run, options.slo)
        note(candidate, runs[candidate][1])
    return Pilot(best({candidate: summary for candidate, (_, summary) in runs.items()}), runs)


def _logs(folder: Path) -> Path:
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    return logs
