"""A study from beginning to end: the best colocated fleet, the comparison with it, and the answers. Prints nothing."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from pdserve.core.model_files import open_model_files
from pdserve.core.model_files.files import fingerprint
from pdserve_bench.compare.candidates import ApartCandidate, Candidate
from pdserve_bench.compare.comparison import ComparisonResult, Measurement
from pdserve_bench.compare.fleets import started
from pdserve_bench.compare.measure import CompareOptions
from pdserve_bench.compare.run import compare
from pdserve_bench.compare.store import Store
from pdserve_bench.compare.verdict import Setting
from pdserve_bench.load.ceiling import Ceiling, own_ceiling
from pdserve_bench.load.generator import Progress, RunOptions
from pdserve_bench.measures.summary import Summary
from pdserve_bench.study.explain import Answer, answer
from pdserve_bench.study.options import StudyOptions
from pdserve_bench.study.pilot import Pilot, apart_spec, colocated_spec, run_pilot
from pdserve_bench.study.reference import Reference


@dataclass(frozen=True, slots=True)
class Study:
    """`apart`, by name, against `result.baseline`; `answers` by rising rate. `ceiling`: of the load generator."""

    options: StudyOptions
    pilot: Pilot
    result: ComparisonResult
    apart: str
    fingerprint: str
    answers: tuple[Answer, ...]
    ceiling: Ceiling


@dataclass(frozen=True, slots=True)
class Notes:
    """Told of what is there as it is there."""

    candidate: Callable[[Candidate | ApartCandidate, Summary], None]
    chosen: Callable[[Pilot], None]
    measurement: Callable[[Measurement], None]
    progress: Callable[[Progress], None] | None = None


def run_study(options: StudyOptions, notes: Notes) -> Study:
    """From the main thread, outside any event loop.

    Raises:
        Gone, ServerError: a fleet does not start, or is gone.
        KeyboardInterrupt: Ctrl-C before anything was compared; what was measured is in the folder.
    """
    ceiling = own_ceiling()
    model = fingerprint(open_model_files(options.source), options.dtype)
    shared = CompareOptions(
        run=RunOptions(drain_s=options.drain_s),
        conditions={"model": model, "num_checked": options.num_checked},
        on_progress=notes.progress,
    )
    pilot = run_pilot(options, shared, notes.candidate)
    notes.chosen(pilot)
    together = colocated_spec(pilot.together.candidate, options)
    ours = apart_spec(pilot.apart.candidate, options)
    with Reference(options.source, options.dtype) as reference:
        find_wrong = partial(reference.wrong, count=options.num_checked) if _can_check(options) else None
        checked = replace(shared, baseline=together.name, find_wrong=find_wrong)
        with started([together, ours, *options.peers], options.folder / "logs") as fleets:
            store = Store(options.folder / "runs")
            result = compare(fleets, options.plans(), options.slo, store, notes.measurement, checked)
    if not result.measured:
        raise KeyboardInterrupt
    setting = Setting(options.num_prefill, options.num_decode, pilot.apart.candidate.chunk, together.name, options.slo)
    answers = tuple(answer(result, ours.name, setting, rate) for rate in result.rate_factors)
    return Study(options, pilot, result, ours.name, model, answers, ceiling)


def _can_check(options: StudyOptions) -> bool:
    """Over HTTP outputs are text, and peers' kernels may take another of two near-tied tokens."""
    return options.num_checked > 0 and options.protocol == "grpc"
