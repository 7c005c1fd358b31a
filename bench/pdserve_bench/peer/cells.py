"""What is measured of a server, and the arithmetic of comparing two. Talks to nobody."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Literal

from pdserve_bench.peer.client import Timing
from pdserve_bench.targets import Target


@dataclass(frozen=True, slots=True)
class Cell:
    """One load: `num_requests` prompts of `prompt_tokens` fresh random ids, `concurrency` of them at a time."""

    kind: Literal["decode", "prefill"]
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    num_requests: int

    @property
    def name(self) -> str:
        return f"decode c{self.concurrency}" if self.kind == "decode" else f"prefill {self.prompt_tokens}"

    @property
    def unit(self) -> str:
        return "output tok/s" if self.kind == "decode" else "prompt tok/s"


CELLS = (
    Cell("decode", 128, 64, 1, 3),
    Cell("decode", 128, 64, 8, 16),
    Cell("decode", 128, 64, 32, 64),
    Cell("prefill", 512, 1, 1, 4),
    Cell("prefill", 1500, 1, 1, 3),
)
MIN_RATIO = {"decode c1": 1.5, "decode c8": 1.4, "decode c32": 1.2, "prefill 512": 1.0, "prefill 1500": 0.9}
MIN_RATIO_BFLOAT16 = {**MIN_RATIO, "prefill 512": 1.1, "prefill 1500": 1.0}
"""With attention in bfloat16 on our side."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One cell on one server, once. Rates in tokens/s; `client_cores`: what the client itself used meanwhile."""

    rate: float
    ttft_ms: float
    itl_ms: float | None
    client_cores: float
    foreign_cores: float = 0.0
    """What others used."""


def sample(cell: Cell, timings: Sequence[Timing], wall_s: float, client_s: float) -> Sample:
    """Of a cell's requests, all sent and answered within `wall_s`, in which the client took `client_s` of CPU time.

    ITL is the median gap between two events: between tokens, as long as the server puts one into each. There is none
    after a single token, though a server may send its end in another event.
    """
    tokens = cell.output_tokens if cell.kind == "decode" else cell.prompt_tokens
    gaps_s = [gap for timing in timings for gap in timing.gaps_s] if cell.output_tokens > 1 else []
    return Sample(
        rate=tokens * len(timings) / wall_s,
        ttft_ms=1000 * median(timing.ttft_s for timing in timings),
        itl_ms=1000 * median(gaps_s) if gaps_s else None,
        client_cores=client_s / wall_s,
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """One cell on both servers; the samples of one repeat stand at the same index."""

    cell: Cell
    ours: tuple[Sample, ...]
    peer: tuple[Sample, ...]

    @property
    def ratios(self) -> list[float]:
        """Of our rate to the peer's, for each repeat: neighbours in time, so that a drift of the machine cancels."""
        return [mine.rate / other.rate for mine, other in zip(self.ours, self.peer, strict=True)]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def foreign_cores(self) -> float:
        """The most that disturbed any sample."""
        return max(one.foreign_cores for one in (*self.ours, *self.peer))

    def to_json(self) -> dict[str, object]:
        ratio = {"median": self.ratio, "min": min(self.ratios), "max": max(self.ratios), "all": self.ratios}
        return {
            "name": self.cell.name,
            "unit": self.cell.unit,
            "load": asdict(self.cell),
            "ratio": ratio,
            "ours": _to_json(self.ours),
            "peer": _to_json(self.peer),
        }


def _to_json(samples: Sequence[Sample]) -> dict[str, object]:
    return {"typical": asdict(typical(samples)), "samples": [asdict(one) for one in samples]}


def typical(samples: Sequence[Sample]) -> Sample:
    """The median of each figure; of what the client and others used, the most."""
    gaps = [one.itl_ms for one in samples if one.itl_ms is not None]
    return Sample(
        rate=median(one.rate for one in samples),
        ttft_ms=median(one.ttft_ms for one in samples),
        itl_ms=median(gaps) if gaps else None,
        client_cores=max(one.client_cores for one in samples),
        foreign_cores=max(one.foreign_cores for one in samples),
    )


def targets(comparisons: Sequence[Comparison], min_ratio: Mapping[str, float] = MIN_RATIO) -> list[Target]:
    """For each cell that has one. A ratio's value is the median over the repeats."""
    return [
        Target(f"{one.cell.name}, ours / peer", "ratio", ">=", one.ratio, min_ratio[one.cell.name], one.foreign_cores)
        for one in comparisons
        if one.cell.name in min_ratio
    ]
