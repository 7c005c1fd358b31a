"""Which fleets are compared: the best colocated one against the best one apart. Both sides are tuned alike. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pdserve_bench.measures.summary import Distribution, Summary

CHUNKS = (32, 64, 128, 256, 512)
TIE = 0.02
"""Goodputs this close, as a share of the better one, are taken for equal."""
LATENCY_TIE = 0.2
"""Likewise p99 latencies: of one short run each, closer ones cannot be told apart."""


@dataclass(frozen=True, slots=True)
class Candidate:
    num_workers: int
    num_threads: int
    chunk: int

    def __str__(self) -> str:
        engines = "one engine" if self.num_workers == 1 else f"{self.num_workers} replicas"
        threads = "one thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        return f"{engines} of {threads}, chunk {self.chunk}"


@dataclass(frozen=True, slots=True)
class ApartCandidate:
    """`chunk`: prompt tokens in a step of a prefill worker."""

    num_prefill: int
    num_decode: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.num_prefill} prefill : {self.num_decode} decode, chunk {self.chunk}"

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode


class Tried(Protocol):
    """Of equal ones, that with fewer workers and the smaller chunk is taken."""

    @property
    def num_workers(self) -> int: ...

    @property
    def chunk(self) -> int: ...


TriedT = TypeVar("TriedT", bound=Tried)


@dataclass(frozen=True, slots=True)
class Choice(Generic[TriedT]):
    """`why`: in words, with the figures that decided."""

    candidate: TriedT
    why: str


def candidates(chunks: Sequence[int] = CHUNKS, num_cores: int = 2) -> tuple[Candidate, ...]:
    """One engine with a thread for each core, and a replica of one thread for each core, at every chunk.

    Raises:
        ValueError: no chunk, or no core.
    """
    if not chunks or min(chunks) < 1 or num_cores < 1:
        raise ValueError(f"chunks {list(chunks)} on {num_cores} cores: nothing to try")
    shapes = dict.fromkeys([(1, num_cores), (num_cores, 1)])
    return tuple(Candidate(*shape, chunk) for shape in shapes for chunk in chunks)


def best(results: Mapping[TriedT, Summary]) -> Choice[TriedT]:
    """The highest goodput; of those within 2% of it the lowest p99 ITL; of those within 20% of that the lowest p99
    TTFT.

    Raises:
        ValueError: there are none.
    """
    if not results:
        raise ValueError("no candidate was measured")
    goodputs = {one: summary.goodput for one, summary in results.items()}
    tied = [one for one in results if goodputs[one] >= (1 - TIE) * max(goodputs.values())]
    if len(tied) == 1:
        return Choice(tied[0], f"{tied[0]}: highest goodput, {_against(goodputs, tied[0])}")
    itls = {one: _p99(results[one].itl) for one in tied}
    calm = [one for one in tied if itls[one] <= (1 + LATENCY_TIE) * min(itls.values())]
    first = f"goodput within {TIE:.0%} of the highest, {max(goodputs.values()):.1%}, as {len(tied) - 1} others'"
    if len(calm) == 1:
        return Choice(calm[0], f"{calm[0]}: {first}; lowest p99 ITL of them, {_ms(itls[calm[0]])}")
    ttfts = {one: _p99(results[one].ttft) for one in calm}
    chosen = min(calm, key=lambda one: (ttfts[one], one.num_workers, one.chunk))
    second = f"p99 ITL within {LATENCY_TIE:.0%} of the lowest, {_ms(min(itls.values()))}"
    return Choice(chosen, f"{chosen}: {first}; {second}; lowest p99 TTFT of those, {_ms(ttfts[chosen])}")


def _against(goodputs: Mapping[TriedT, float], chosen: TriedT) -> str:
    others = [goodput for one, goodput in goodputs.items() if one != chosen]
    next_best = f" against {max(others):.1%} of the next" if others else ", and the only one"
    return f"{goodputs[chosen]:.1%} of offered requests{next_best}"


def _p99(distribution: Distribution) -> float:
    """Infinite where nothing was completed."""
    return math.inf if distribution.p99 is None else distribution.p99


def _ms(value_s: float) -> str:
    return f"{1e3 * value_s:.0f} ms" if math.isfinite(value_s) else "none measured"
