"""Where the commands show progress, figures and faults. Decides nothing."""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pdserve_bench.load import generator
from pdserve_bench.serve.run import Served
from pdserve_bench.serve.session import OnProgress
from pdserve_bench.serve.tables import served_lines, served_tables
from pdserve_bench.serve.verdict import Verdict, common_errors


@dataclass(frozen=True, slots=True)
class Terminal:
    """`out` for results, `err` for notes and progress; `print_whole` shows a table that keeps every digit."""

    out: Console
    err: Console
    print_whole: Callable[[Table], None]

    def fault(self, message: str) -> None:
        self.err.print(Text.assemble(("error: ", "bold red"), message))

    def note(self, message: str) -> None:
        self.err.print(Text.assemble(("note: ", "yellow"), message))

    def verdict(self, verdict: Verdict) -> None:
        for message in verdict.notes:
            self.note(message)
        for message in verdict.faults:
            self.fault(message)

    def seed(self, seed: int) -> None:
        self.err.print(f"seed {seed}: --seed {seed} sends the same again")

    def served(self, served: Served) -> None:
        for table in served_tables(served):
            self.print_whole(table)
        for line in served_lines(served):
            self.out.print(line)
        for message in (*served.limits_told, *common_errors(served.run.records)):
            self.note(message)

    @contextmanager
    def progress(self) -> Generator[OnProgress]:
        """A bar on a terminal, nothing elsewhere. Drawn only when told something: no thread takes the client's time."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        bars = Progress(
            *columns, TextColumn("{task.fields[in_flight]} in flight"), console=self.err, auto_refresh=False
        )
        tasks: dict[str, TaskID] = {}

        def show(name: str, progress: generator.Progress) -> None:
            if name not in tasks:
                for task in tasks.values():
                    bars.update(task, visible=False)
                tasks[name] = bars.add_task(name, total=progress.num_offered, in_flight=0)
            bars.update(tasks[name], completed=progress.num_done, in_flight=progress.num_in_flight, refresh=True)

        with bars if self.err.is_terminal else nullcontext():
            yield show if self.err.is_terminal else _ignore


def _ignore(name: str, progress: generator.Progress) -> None:
    """Progress on what is no terminal."""
