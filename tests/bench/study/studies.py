"""A study of made-up runs: colocated with stalls, apart without."""

from dataclasses import replace
from pathlib import Path

from pdserve_bench.compare.candidates import ApartCandidate, Candidate, best
from pdserve_bench.compare.comparison import ComparisonResult, Measurement
from pdserve_bench.compare.schedule import Cell
from pdserve_bench.compare.verdict import Setting
from pdserve_bench.load.ceiling import Ceiling
from pdserve_bench.load.presets import preset
from pdserve_bench.load.records import RequestRecord, RunResult, TokenEvent
from pdserve_bench.measures.summarise import summarise
from pdserve_bench.measures.summary import Slo
from pdserve_bench.study.explain import answer
from pdserve_bench.study.options import MixLoad, StudyOptions
from pdserve_bench.study.pilot import Pilot
from pdserve_bench.study.study import Study
from tests.support.phase_runs import Shape, run_of

TOGETHER, APART = "colocated 1x2 threads, chunk 64", "disaggregated 1P:1D, chunk 512"
SLO = Slo()


def token_by_token(record: RequestRecord, itl_s: float) -> RequestRecord:
    first_s = record.events[0].at_s
    events = tuple(TokenEvent(first_s + index * itl_s, 1) for index in range(record.num_output_tokens))
    return replace(record, events=events, ended_s=events[-1].at_s)


def made_run(name: str, itl_s: float, seed: int) -> RunResult:
    roles = ("colocated",) if name.startswith("colocated") else ("prefill", "decode")
    run = run_of(Shape(decode_token_s=itl_s, transfer_s=0.0 if len(roles) == 1 else 0.01), seed)
    records = tuple(token_by_token(record, itl_s) for record in run.records)
    cpu_s = {f"{role}-0": 0.4 * run.duration_s for role in roles}
    return replace(run, name=name, records=records, server_cpu_s=cpu_s)


def measurement(cell: Cell, itl_s: float, seed: int) -> Measurement:
    run = made_run(cell.label, itl_s, seed)
    return Measurement(cell, run, summarise(run, SLO))


def study(folder: Path, itls_s: tuple[float, float] = (0.12, 0.02), rates: tuple[float, ...] = (1.0, 2.0)) -> Study:
    """`itls_s`: of colocated and of apart. Repeats differ by 1%."""
    together_s, apart_s = itls_s
    measured = [
        measurement(Cell(rate, repeat, name, again), itl_s * (1 + 0.01 * repeat), 3 * repeat + again)
        for rate in rates
        for repeat in range(2)
        for name, again, itl_s in ((TOGETHER, False, together_s), (TOGETHER, True, together_s), (APART, False, apart_s))
    ]
    pinning = {TOGETHER: {"colocated-0": [0, 1]}, APART: {"prefill-0": [0], "decode-0": [1]}}
    result = ComparisonResult(
        baseline=TOGETHER,
        slo=SLO,
        measured=tuple(measured),
        described={name: {"pinning": processes} for name, processes in pinning.items()},
        plans={rate: [{"seed": 1}, {"seed": 2}] for rate in rates},
    )
    run = made_run(TOGETHER, together_s, 9)
    summary, together, apart = summarise(run, SLO), Candidate(1, 2, 64), ApartCandidate(1, 1, 512)
    pilot = Pilot(best({together: summary}), best({apart: summary}), {together: summary, apart: summary})
    options = StudyOptions(folder, MixLoad(preset("mixed")), folder, seed=1, cores=(0, 1), vocab_size=300)
    setting = Setting(1, 1, 512, TOGETHER, SLO)
    answers = tuple(answer(result, APART, setting, rate) for rate in rates)
    return Study(options, pilot, result, APART, "a fingerprint", answers, Ceiling(200.0, 10_000.0))
