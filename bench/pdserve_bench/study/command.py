"""`pdserve bench compare`, less its flags: runs a study, tells of it as it goes, writes what came of it."""

from dataclasses import dataclass, field
from pathlib import Path

from pdserve_bench.compare.candidates import ApartCandidate, Candidate
from pdserve_bench.compare.comparison import Measurement
from pdserve_bench.compare.document import tables
from pdserve_bench.load.generator import Progress
from pdserve_bench.measures.summary import Summary
from pdserve_bench.report import noise_mark
from pdserve_bench.serve.run_flags import new_seed
from pdserve_bench.serve.session import OnProgress
from pdserve_bench.serve.terminal import Terminal
from pdserve_bench.study.options import StudyOptions
from pdserve_bench.study.pilot import Pilot
from pdserve_bench.study.report import headlines, study_tables, write_study
from pdserve_bench.study.study import Notes, run_study

INTERRUPTED = 130
_SEED_FILE = "seed"


def kept_seed(folder: Path, wanted: int | None) -> int:
    """That of the study which `folder` holds already, so that it can go on; else `wanted` or a new one, kept there now.

    Raises:
        OSError: the folder cannot be used.
        ValueError: it holds a study of another seed than the wanted one.
    """
    path = folder / _SEED_FILE
    if path.exists():
        kept = int(path.read_text(encoding="ascii"))
        if wanted not in (None, kept):
            raise ValueError(f"{folder} holds a study with seed {kept}: name another folder for seed {wanted}")
        return kept
    seed = new_seed(wanted)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{seed}\n", encoding="ascii")
    return seed


def run(options: StudyOptions, terminal: Terminal) -> int:
    """The exit code.

    Raises:
        Gone, ServerError: a fleet does not start, or is gone. OSError: a file cannot be written.
    """
    terminal.seed(options.seed)
    with terminal.progress() as progress:
        teller = _Teller(terminal, progress)
        try:
            study = run_study(options, teller.notes())
        except KeyboardInterrupt:
            terminal.note(f"interrupted before there was anything to compare; {options.folder} keeps what was measured")
            return INTERRUPTED
    for table in (*tables(study.result), *study_tables(study)):
        terminal.print_whole(table)
    for line in headlines(study):
        terminal.out.print(line)
    for path in write_study(study, options.folder / "report"):
        terminal.note(f"wrote {path}")
    return INTERRUPTED if study.result.interrupted else 0


@dataclass(slots=True)
class _Teller:
    """One line for each run, and a bar while it lasts."""

    terminal: Terminal
    progress: OnProgress
    num_told: int = field(default=0)

    def notes(self) -> Notes:
        return Notes(self._candidate, self._chosen, self._measurement, self._progressed)

    def _candidate(self, candidate: Candidate | ApartCandidate, summary: Summary) -> None:
        self._line(str(candidate), summary)

    def _chosen(self, pilot: Pilot) -> None:
        for why in (pilot.together.why, pilot.apart.why):
            self.terminal.err.print(f"chosen: {why}")

    def _measurement(self, one: Measurement) -> None:
        mark = noise_mark(one.run.foreign_cores)
        self._line(f"rate x{one.cell.rate_factor:g}, repeat {one.cell.repeat + 1}, {one.cell.label}{mark}", one.summary)

    def _line(self, name: str, summary: Summary) -> None:
        self.num_told += 1
        done = f"{summary.completed} of {summary.offered} completed, goodput {summary.goodput:.0%}"
        self.terminal.err.print(
            f"{name}: {done}, ITL p50 {_ms(summary.itl.median)} p99 {_ms(summary.itl.p99)}, "
            f"TTFT p50 {_ms(summary.ttft.median)} p99 {_ms(summary.ttft.p99)}"
        )

    def _progressed(self, progress: Progress) -> None:
        self.progress(f"run {self.num_told + 1}", progress)


def _ms(value_s: float | None) -> str:
    return "–" if value_s is None else f"{1000 * value_s:,.0f} ms"
