"""One load of a capacity sweep, what was measured under it, and what it is held to."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

MARGIN = 1.1
"""A safe load meets every objective at this multiple of itself, too."""


@dataclass(frozen=True, slots=True, order=True)
class Load:
    """Documents that are always in flight, and interactive requests/s beside them."""

    num_documents: int
    rate: float

    @property
    def with_margin(self) -> "Load":
        """`MARGIN` times as much; documents are whole, so they are rounded up."""
        return Load(math.ceil(round(self.num_documents * MARGIN, 6)), round(self.rate * MARGIN, 6))

    @property
    def name(self) -> str:
        return f"{self.rate:g} requests/s, {self.num_documents} documents"

    def within(self, other: "Load") -> bool:
        """No more than `other` in either respect."""
        return self.num_documents <= other.num_documents and self.rate <= other.rate


@dataclass(frozen=True, slots=True)
class Cell:
    """One load as measured. Latencies are of interactive requests; tokens/s of both classes. None: the server does
    not say, or there was nothing to measure."""

    rate: float
    num_documents: int
    duration_s: float
    offered: int
    completed: int
    num_failures: int
    """Interactive requests and documents that ended with an error or were refused."""
    unfinished: int
    """Interactive requests that were still running, or unsent, when the run's time was over."""
    num_expired: int
    """Of the failures: those whose time in the queue ran out."""
    documents_completed: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    cached_share: float | None
    """Cached ÷ prompt tokens."""
    peak_block_occupancy: float | None
    """The largest share of KV blocks, 0 to 1, that one worker had in use."""
    num_allocation_failures: float | None
    foreign_cores: float

    @property
    def load(self) -> Load:
        return Load(self.num_documents, self.rate)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Cell":
        return Cell(**{one.name: data[one.name] for one in fields(Cell)})


@dataclass(frozen=True, slots=True)
class Objectives:
    """What every cell is held to, in seconds; besides them, that nothing fails, expires or cannot be allocated."""

    ttft_p99_s: float = 6.0
    itl_p99_s: float = 0.1

    def missed(self, cell: Cell) -> list[str]:
        """In words; empty: the cell meets them all. A latency without samples is missed: nothing speaks for it."""
        found = [
            *_too_high("TTFT p99", cell.ttft_p99_s, self.ttft_p99_s),
            *_too_high("ITL p99", cell.itl_p99_s, self.itl_p99_s),
        ]
        if cell.num_failures:
            expired = f", {cell.num_expired} of them in the queue" if cell.num_expired else ""
            found.append(f"{cell.num_failures} requests failed{expired}")
        if cell.unfinished:
            found.append(f"{cell.unfinished} requests were left over")
        if cell.num_documents and not cell.documents_completed:
            found.append("no document was completed")
        if cell.num_allocation_failures:
            found.append(f"{cell.num_allocation_failures:g} KV allocations failed")
        return found


def _too_high(name: str, value: float | None, limit: float) -> list[str]:
    if value is None:
        return [f"no {name}: no interactive request gave any"]
    return [f"{name} {value * 1e3:.0f} ms > {limit * 1e3:.0f} ms"] if value > limit else []
