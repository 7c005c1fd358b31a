"""Finds the fleets to compare, the best colocated one and the best one apart: every candidate once, under one load."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pdserve_bench.compare.candidates import ApartCandidate, Candidate, Choice, best, candidates
from pdserve_bench.compare.fleets import FleetSpec, colocated, disaggregated, started
from pdserve_bench.compare.measure import CompareOptions, Measurer
from pdserve_bench.compare.schedule import Cell
from pdserve_bench.compare.store import Store
from pdserve_bench.load.records import RunResult
from pdserve_bench.measures.summarise import summarise
from pdserve_bench.measures.summary import Summary
from pdserve_bench.study.options import StudyOptions


@dataclass(frozen=True, slots=True)
class Pilot:
    """The candidates' figures, in the order in which they were measured."""

    together: Choice[Candidate]
    apart: Choice[ApartCandidate]
    tried: Mapping[Candidate | ApartCandidate, Summary]


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


def apart_spec(candidate: ApartCandidate, options: StudyOptions) -> FleetSpec:
    spec = disaggregated(
        candidate.num_prefill,
        candidate.num_decode,
        cores=options.cores,
        num_blocks=options.num_blocks,
        prefill_chunk=candidate.chunk,
        extra=options.serve_flags,
    )
    return replace(spec, protocol=options.protocol)


def run_pilot(
    options: StudyOptions,
    compare_options: CompareOptions,
    note: Callable[[Candidate | ApartCandidate, Summary], None],
) -> Pilot:
    """Each is started, measured and ended before the next.

    Raises:
        Gone, ServerError: one does not start, or answers nothing.
        KeyboardInterrupt: Ctrl-C; what was measured is in the store.
    """

    def tried(candidate: Candidate | ApartCandidate, spec: FleetSpec) -> Summary:
        run = _measured(spec, options, compare_options)
        if run.interrupted:
            raise KeyboardInterrupt
        summary = summarise(run, options.slo)
        note(candidate, summary)
        return summary

    shapes = [ApartCandidate(options.num_prefill, options.num_decode, chunk) for chunk in options.prefill_chunks]
    together = {one: tried(one, colocated_spec(one, options)) for one in candidates(options.chunks, len(options.cores))}
    apart = {one: tried(one, apart_spec(one, options)) for one in shapes}
    return Pilot(best(together), best(apart), dict([*together.items(), *apart.items()]))


def _measured(spec: FleetSpec, options: StudyOptions, compare_options: CompareOptions) -> RunResult:
    """From the store, if it is there; the fleet is started all the same, as only it knows its model's name."""
    store, plan = Store(options.folder / "pilot"), options.pilot_plan()
    with started([spec], _logs(options.folder)) as (fleet,), asyncio.Runner() as runner:
        measurer = Measurer([fleet], compare_options, runner)
        cell = Cell(max(options.rate_factors), 0, spec.name)
        digest = measurer.digest(fleet, plan)
        return store.get_or_run(cell.key, digest, partial(measurer.measure, fleet, plan, cell))


def _logs(folder: Path) -> Path:
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    return logs
