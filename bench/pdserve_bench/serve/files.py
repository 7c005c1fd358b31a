"""What a run, a search or a sweep leaves on disk: JSON, vLLM's JSON, CSV and a page. Prints nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pdserve_bench.conditions import conditions
from pdserve_bench.measures.csv_files import write_requests_csv
from pdserve_bench.measures.summary import Slo
from pdserve_bench.measures.vllm_flags import VllmOptions
from pdserve_bench.measures.vllm_format import vllm_result
from pdserve_bench.pages.capacity_map import CapacityPoint, capacity_map
from pdserve_bench.pages.page import Page, Section, run_section, write_page
from pdserve_bench.report import result, write_result
from pdserve_bench.serve.capacity import Capacity
from pdserve_bench.serve.run import Served
from pdserve_bench.serve.search import Found


@dataclass(frozen=True, slots=True)
class VllmFile:
    """vLLM's `--save-result`. `request_rate` in requests/s, infinite for all at once."""

    folder: Path
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    options: VllmOptions

    def write(self, served: Served, model: str) -> Path:
        """Named as vLLM names it. Raises OSError: it cannot be written."""
        at = datetime.fromtimestamp(served.run.begin_unix_s, UTC).strftime("%Y%m%d-%H%M%S")
        limit = "" if self.max_concurrency is None else f"-concurrency{self.max_concurrency}"
        short = model.rpartition("/")[2] or "model"
        path = self.folder / f"{self.options.backend}-{self.request_rate:g}qps{limit}-{short}-{at}.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        document = vllm_result(
            served.run,
            served.summary,
            request_rate=self.request_rate,
            burstiness=self.burstiness,
            max_concurrency=self.max_concurrency,
            model=model,
            options=self.options,
        )
        write_result(path, document)
        return path


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where to write what; None: nowhere. `settings`: whatever was chosen, as JSON."""

    json_file: Path | None = None
    csv_file: Path | None = None
    html_file: Path | None = None
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    seed: int = 0

    def conditions(self, foreign_cores: float) -> dict[str, object]:
        return conditions(self.settings, {"load": self.seed}, foreign_cores)

    def write_served(self, served: Served, slo: Slo) -> None:
        """Raises OSError: a file cannot be written."""
        about = self.conditions(served.run.foreign_cores)
        if self.json_file is not None:
            write_result(self.json_file, result("serve", about, served.to_json(), ()))
        if self.csv_file is not None:
            write_requests_csv(self.csv_file, served.run)
        if self.html_file is not None:
            section = run_section(served.run.name, served.run, served.summary, slo)
            told = (f"Prefix cache: hit rate {served.cache}.", *served.verdict.faults, *served.limits_told)
            write_page(self.html_file, Page("pdserve bench serve", told, (section,), about))

    def write_found(self, found: Found, runs: Sequence[Served], slo: Slo) -> None:
        """The CSV is of the last run. Raises OSError: a file cannot be written."""
        about = self.conditions(max((served.run.foreign_cores for served in runs), default=0.0))
        if self.json_file is not None:
            trials = {"found": asdict(found), "runs": [_without_records(served) for served in runs]}
            write_result(self.json_file, result("serve search", about, trials, ()))
        if self.csv_file is not None and runs:
            write_requests_csv(self.csv_file, runs[-1].run)
        if self.html_file is not None:
            sections = tuple(run_section(one.run.name, one.run, one.summary, slo) for one in runs)
            write_page(self.html_file, Page("pdserve bench serve --search", (told(found),), sections, about))

    def write_capacity(self, capacity: Capacity) -> None:
        """Raises OSError: a file cannot be written."""
        about = self.conditions(max((cell.foreign_cores for cell in capacity.cells), default=0.0))
        if self.json_file is not None:
            write_result(self.json_file, result("capacity", about, capacity.to_json(), ()))
        if self.html_file is not None:
            missed = {cell.load: capacity.objectives.missed(cell) for cell in capacity.cells}
            points = [
                CapacityPoint(load.rate, load.num_documents, not faults, "; ".join(faults))
                for load, faults in missed.items()
            ]
            figures = (("Loads that were tried", capacity_map(points)),)
            section = Section("Capacity", (capacity_told(capacity),), (), figures)
            write_page(self.html_file, Page("pdserve bench capacity", (capacity_told(capacity),), (section,), about))


def _without_records(served: Served) -> dict[str, object]:
    about = {"name": served.run.name, "about": dict(served.run.about), "limits": asdict(served.run.limits)}
    return {**served.to_json(), "run": about}


def told(found: Found) -> str:
    """A search's answer in a sentence."""
    if found.rate is None:
        above = "" if found.failing_rate is None else f": {found.failing_rate:.4g} requests/s are too many"
        return f"No rate was found at which goodput is good enough{above}."
    upper = "nothing failed" if found.failing_rate is None else f"{found.failing_rate:.4g} are too many"
    end = "" if found.converged else " The search did not come to its end."
    return f"Goodput is good enough up to {found.rate:.4g} requests/s; {upper}.{end}"


def capacity_told(capacity: Capacity) -> str:
    """A sweep's answer in a sentence."""
    point = capacity.safe_point
    cut = " The sweep was interrupted." if capacity.interrupted else ""
    if point is None:
        return f"No load that was measured is safe.{cut}"
    return f"The safe point is {point.name}: every objective is met there, and at 1.1 times as much.{cut}"
