"""What transfers cost, for machines and people. Measures nothing."""

from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from pdserve_bench.conditions import conditions
from pdserve_bench.report import new_table, noise_mark, result
from pdserve_bench.targets import Target
from pdserve_bench.transfer.measure import Cell

MIN_SHARE_OF_LIMIT = {"shm": 0.7, "grpc": 0.4}
FROM_BYTES = 4_000_000
"""Smaller batches are mostly control messages."""
GB = 1e9


def targets(cells: Sequence[Cell]) -> list[Target]:
    return [
        Target(
            f"{cell.transport} / {cell.limit}, {cell.num_bytes / 1e6:.1f} MB",
            "ratio",
            ">=",
            cell.share_of_limit,
            MIN_SHARE_OF_LIMIT[cell.transport],
            cell.foreign_cores,
        )
        for cell in cells
        if cell.num_bytes >= FROM_BYTES
    ]


def table(cells: Sequence[Cell]) -> Table:
    numbers = ("MB", "ms", "whole ms", "GB/s", "CPU s/GB", "limit ms", "limit GB/s", "limit CPU s/GB", "of the limit")
    found = new_table("Batches of KV blocks", ("transport", "limit"), numbers)
    for cell in sorted(cells, key=lambda cell: (cell.transport, cell.num_bytes)):
        gigabytes = cell.num_bytes / GB
        found.add_row(
            cell.transport,
            cell.limit,
            f"{cell.num_bytes / 1e6:.1f}",
            f"{1e3 * cell.seconds:.2f}",
            f"{1e3 * cell.whole_s:.2f}",
            f"{gigabytes / cell.seconds:.2f}",
            f"{cell.cpu_s / gigabytes:.2f}",
            f"{1e3 * cell.limit_s:.2f}",
            f"{gigabytes / cell.limit_s:.2f}",
            f"{cell.limit_cpu_s / gigabytes:.2f}",
            f"{cell.share_of_limit:.2f}{noise_mark(cell.foreign_cores)}",
        )
    return found


def document(cells: Sequence[Cell], settings: dict[str, object], seed: int) -> dict[str, object]:
    foreign_cores = max((cell.foreign_cores for cell in cells), default=0.0)
    measured = {"cells": [{**asdict(cell), "share_of_limit": cell.share_of_limit} for cell in cells]}
    return result("transfer", conditions(settings, {"blocks": seed}, foreign_cores), measured, targets(cells))
