"""A benchmark's result as a file for machines and its targets as a table for people."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from pdserve_bench.foreign_cpu import MAX_FOREIGN_CORES
from pdserve_bench.targets import Target


def result(
    benchmark: str, conditions: Mapping[str, object], measured: Mapping[str, object], targets: Sequence[Target]
) -> dict[str, object]:
    """The document that every benchmark writes; `measured` holds what is its own."""
    return {
        "benchmark": benchmark,
        "conditions": dict(conditions),
        **measured,
        "targets": [target.to_json() for target in targets],
    }


def write_result(path: Path, document: Mapping[str, object]) -> None:
    """As JSON. A number that is none, or infinite, is a bug here: ValueError."""
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def targets_table(targets: Sequence[Target]) -> Table:
    table = new_table("Targets", ("figure",), ("value", "target", "unit", "met"))
    for target in targets:
        met = "yes" if target.met else "no"
        table.add_row(
            target.name,
            f"{target.value:.4g}",
            f"{target.op} {target.target:.4g}",
            target.unit,
            met + noise_mark(target.noise),
            style="" if target.met else "red",
        )
    return table


def new_table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    """Columns of text, then columns of numbers."""
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    for name in names:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def noise_mark(foreign_cores: float) -> str:
    """Follows a figure that others disturbed."""
    return " (noisy)" if foreign_cores > MAX_FOREIGN_CORES else ""
