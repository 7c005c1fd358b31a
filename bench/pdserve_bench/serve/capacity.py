"""How much interactive load and how many documents at a time a server bears: what to measure next, and what is safe.

Pure policy on cells, and a loop around a callable that measures one. Sends nothing itself.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any

from pdserve_bench.serve.cells import MARGIN, Cell, Load, Objectives


@dataclass(frozen=True, slots=True)
class Grid:
    """The loads of a sweep: each rate with each number of documents."""

    rates: tuple[float, ...]
    documents: tuple[int, ...]

    def __post_init__(self) -> None:
        """ValueError: no load at all, or one that is not a load."""
        if not self.rates or not all(0 < rate < math.inf for rate in self.rates):
            raise ValueError(f"rates {self.rates}: expected some, each above 0")
        if not self.documents or min(self.documents) < 0:
            raise ValueError(f"documents {self.documents}: expected some, none below 0")

    @property
    def loads(self) -> list[Load]:
        return sorted({Load(number, rate) for number in self.documents for rate in self.rates})


def next_load(grid: Grid, met: Mapping[Load, bool]) -> Load | None:
    """What to measure next, given which loads met every objective; None: the safe points are known.

    More than a load that failed is taken to fail, and is not measured.
    """
    for load in grid.loads:
        if load not in met and not _beyond_a_failure(load, met):
            return load
    for number in sorted(set(grid.documents)):
        for load in _candidates(grid, number, met):
            margin = load.with_margin
            if _beyond_a_failure(margin, met) or met.get(margin) is False:
                continue
            if margin not in met:
                return margin
            break
    return None


def safe_loads(grid: Grid, met: Mapping[Load, bool]) -> list[Load]:
    """For each number of documents the highest rate that is safe, if there is one."""
    found: list[Load] = []
    for number in sorted(set(grid.documents)):
        found += [load for load in _candidates(grid, number, met) if met.get(load.with_margin)][:1]
    return found


def _candidates(grid: Grid, num_documents: int, met: Mapping[Load, bool]) -> list[Load]:
    """Highest rate first; a rate with a failure at or below it, at no more documents, is none."""
    loads = [load for load in grid.loads if load.num_documents == num_documents and met.get(load)]
    return [load for load in reversed(loads) if not _beyond_a_failure(load, met)]


def _beyond_a_failure(load: Load, met: Mapping[Load, bool]) -> bool:
    return any(not fine and failed != load and failed.within(load) for failed, fine in met.items())


@dataclass(frozen=True, slots=True)
class Capacity:
    """A finished or interrupted sweep. `safe`: one load for each number of documents that has any."""

    cells: tuple[Cell, ...]
    objectives: Objectives
    safe: tuple[Load, ...]
    interrupted: bool = False

    @property
    def safe_point(self) -> Load | None:
        """Of the safe loads that no other one exceeds, that under which most tokens a second were measured."""
        highest = [load for load in self.safe if not any(load != other and load.within(other) for other in self.safe)]
        tokens = {cell.load: cell.prompt_tokens_per_s + cell.output_tokens_per_s for cell in self.cells}
        return max(highest, key=lambda load: tokens[load], default=None)

    def to_json(self) -> dict[str, object]:
        point = self.safe_point
        return {
            "objectives": asdict(self.objectives),
            "cells": [{**cell.to_json(), "missed": self.objectives.missed(cell)} for cell in self.cells],
            "safe": [asdict(load) for load in self.safe],
            "safe_point": None if point is None else asdict(point),
            "margin": MARGIN,
            "interrupted": self.interrupted,
        }


MeasureCell = Callable[[Load], Awaitable[Cell | None]]
"""None: interrupted."""

Store = MutableMapping[str, Mapping[str, Any]]
"""By a load's name the cell as JSON. One that outlives the process makes a sweep resumable."""


async def sweep(
    grid: Grid, objectives: Objectives, measure: MeasureCell, store: Store, note: Callable[[Cell], None]
) -> Capacity:
    """Measure what is needed to know the safe points. What `store` holds is not measured again, only judged anew."""
    cells: dict[Load, Cell] = {}
    interrupted = False
    while (load := next_load(grid, {key: not objectives.missed(cell) for key, cell in cells.items()})) is not None:
        kept = store.get(load.name)
        cell = Cell.from_json(kept) if kept is not None else await measure(load)
        if cell is None:
            interrupted = True
            break
        if kept is None:
            store[load.name] = cell.to_json()
        cells[load] = cell
        note(cell)
    met = {key: not objectives.missed(cell) for key, cell in cells.items()}
    ordered = tuple(cells[load] for load in sorted(cells))
    return Capacity(ordered, objectives, tuple(safe_loads(grid, met)), interrupted)
