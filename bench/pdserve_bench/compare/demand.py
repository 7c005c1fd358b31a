"""What a load asks of each phase beside what the phase can give, and the KV memory it holds. Pure arithmetic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from pdserve_bench.report import new_table

TARGET_UTILISATION = 0.8
"""Of a phase's rate, above which waits grow out of proportion: what a suggested fleet is sized for."""
SMOLLM2_KV_BYTES_PER_TOKEN = 23_040
MAX_SUGGESTED = 8
"""The most workers of one role in a suggested ratio."""
NEAR = 1.2
"""Ratios that differ by less than this factor are taken for one, as demands are never known better."""


@dataclass(frozen=True, slots=True)
class ClassDemand:
    """One class of requests: λ a second, I and O tokens on average, and seconds that a request holds its KV blocks."""

    name: str
    rate_per_s: float
    prompt_tokens: float
    output_tokens: float
    residence_s: float

    def __post_init__(self) -> None:
        for field in ("rate_per_s", "prompt_tokens", "output_tokens", "residence_s"):
            if not (math.isfinite(getattr(self, field)) and getattr(self, field) >= 0):
                raise ValueError(f"class {self.name!r}: {field} must be a number from 0 on, not {getattr(self, field)}")

    @property
    def prompt_rate(self) -> float:
        """λI, prompt tokens a second."""
        return self.rate_per_s * self.prompt_tokens

    @property
    def output_rate(self) -> float:
        """λO, output tokens a second."""
        return self.rate_per_s * self.output_tokens

    @property
    def num_resident(self) -> float:
        """Requests that hold blocks at a time, on average: arrival rate × residence (Little 1961)."""
        return self.rate_per_s * self.residence_s

    def kv_bytes(self, bytes_per_token: int) -> float:
        """Reserved on average; a reservation is for the prompt and the whole output."""
        return self.num_resident * (self.prompt_tokens + self.output_tokens) * bytes_per_token


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """What one worker of each role was measured to do; decode at the batch sizes of the load in question.

    `kv_bytes`: the pool of one decode worker; None: not known.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    kv_bytes: float | None = None

    def __post_init__(self) -> None:
        for field in ("prefill_tokens_per_s", "decode_tokens_per_s"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} must be above 0, not {getattr(self, field)}")


@dataclass(frozen=True, slots=True)
class Demand:
    """Of all classes together, against one worker of each role."""

    classes: tuple[ClassDemand, ...]
    rates: WorkerRates
    kv_bytes_per_token: int = SMOLLM2_KV_BYTES_PER_TOKEN

    @property
    def prompt_rate(self) -> float:
        """P = Σ λI."""
        return sum(one.prompt_rate for one in self.classes)

    @property
    def output_rate(self) -> float:
        """D = Σ λO."""
        return sum(one.output_rate for one in self.classes)

    @property
    def kv_bytes(self) -> float:
        return sum(one.kv_bytes(self.kv_bytes_per_token) for one in self.classes)

    @property
    def prefill_utilisation(self) -> float:
        """P ÷ what one prefill worker computes; above 1 it falls behind for as long as the load lasts."""
        return self.prompt_rate / self.rates.prefill_tokens_per_s

    @property
    def decode_utilisation(self) -> float:
        return self.output_rate / self.rates.decode_tokens_per_s

    @property
    def kv_utilisation(self) -> float | None:
        return None if not self.rates.kv_bytes else self.kv_bytes / self.rates.kv_bytes

    @property
    def num_prefill(self) -> int:
        """Workers that keep each below the target utilisation."""
        return _workers(self.prefill_utilisation)

    @property
    def num_decode(self) -> int:
        """For the rate and for the KV memory, whichever needs more."""
        return max(_workers(self.decode_utilisation), _workers(self.kv_utilisation or 0.0))

    @property
    def ratio(self) -> tuple[int, int]:
        """The simplest prefill:decode ratio near that of the two utilisations; the nearest one, if none is near."""
        wanted = max(self.prefill_utilisation, 1e-9) / max(self.decode_utilisation, self.kv_utilisation or 0.0, 1e-9)
        counts = range(1, MAX_SUGGESTED + 1)
        error = {(p, d): abs(math.log(p / d / wanted)) for p in counts for d in counts if math.gcd(p, d) == 1}
        near = [pair for pair in error if error[pair] <= math.log(NEAR)]
        return (
            min(near, key=lambda pair: (sum(pair), error[pair])) if near else min(error, key=lambda pair: error[pair])
        )


def _workers(utilisation: float) -> int:
    return max(1, math.ceil(utilisation / TARGET_UTILISATION - 1e-9))


def class_demand(name: str, requests: Sequence[tuple[int, int, float]], span_s: float) -> ClassDemand:
    """From what was sent within `span_s` seconds: (prompt tokens, output tokens, seconds of residence) a request.

    Raises:
        ValueError: no requests, or no time.
    """
    if not requests or not span_s > 0:
        raise ValueError(f"class {name!r}: {len(requests)} requests in {span_s} s say nothing about its demand")
    prompts, outputs, residences = zip(*requests, strict=True)
    num = len(requests)
    return ClassDemand(name, num / span_s, sum(prompts) / num, sum(outputs) / num, sum(residences) / num)


def demand_table(demand: Demand) -> Table:
    """A row a class, then the sum, what one worker of each role does, and the share of it that is asked for."""
    numbers = ("λ, 1/s", "I, tokens", "O, tokens", "P = λI, tok/s", "D = λO, tok/s", "resident", "KV, MB")
    table = new_table("Demand, and what one worker of each role does", ("class",), numbers)
    for one in demand.classes:
        cells = (one.rate_per_s, one.prompt_tokens, one.output_tokens, one.prompt_rate, one.output_rate)
        kv = one.kv_bytes(demand.kv_bytes_per_token) / 1e6
        table.add_row(one.name, *(f"{cell:,.4g}" for cell in cells), f"{one.num_resident:.1f}", f"{kv:,.1f}")
    rates, kv_share = demand.rates, demand.kv_utilisation
    kv_pool = "" if rates.kv_bytes is None else f"{rates.kv_bytes / 1e6:,.1f}"
    total = (f"{demand.prompt_rate:,.0f}", f"{demand.output_rate:,.0f}")
    resident = f"{sum(one.num_resident for one in demand.classes):.1f}"
    table.add_row("all", "", "", "", *total, resident, f"{demand.kv_bytes / 1e6:,.1f}")
    measured = (f"{rates.prefill_tokens_per_s:,.0f}", f"{rates.decode_tokens_per_s:,.0f}")
    table.add_row("one worker, measured", "", "", "", *measured, "", kv_pool)
    shares = (f"{demand.prefill_utilisation:.0%}", f"{demand.decode_utilisation:.0%}")
    table.add_row("asked of it", "", "", "", *shares, "", "" if kv_share is None else f"{kv_share:.0%}")
    return table


def demand_sentence(demand: Demand) -> str:
    """How many workers of each role the load needs, and in which ratio."""
    prefill, decode = demand.ratio
    return (
        f"The load asks for {demand.prompt_rate:,.0f} prompt tokens/s ({demand.prefill_utilisation:.0%} of one prefill "
        f"worker), {demand.output_rate:,.0f} output tokens/s ({demand.decode_utilisation:.0%} of one decode worker) "
        f"and {demand.kv_bytes / 1e6:,.0f} MB of KV. {demand.num_prefill} prefill and {demand.num_decode} decode "
        f"workers keep each below {TARGET_UTILISATION:.0%}; the ratio of the demands is {prefill}:{decode}."
    )
