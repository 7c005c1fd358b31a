"""What a study compares, under which loads, and where it keeps what it measures. Starts nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pdserve_bench.compare.candidates import CHUNKS
from pdserve_bench.compare.fleet_specs import FleetSpec
from pdserve_bench.load.mixes import Mix, make_plan, trace_plan
from pdserve_bench.load.plan import LoadPlan
from pdserve_bench.load.prompts import derived_seed
from pdserve_bench.load.traces import TraceRow, rescaled
from pdserve_bench.measures.summary import Slo

_SEEDS = 2**63
_PILOT = "pilot"


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """Rows of a trace, `block_tokens` and limits in tokens; see `traces.rescaled`."""

    name: str
    rows: tuple[TraceRow, ...]
    length_factor: float = 1.0
    max_prompt_tokens: int = 4096
    max_output_tokens: int = 512

    def plan(self, rate_factor: float, duration_s: float, seed: int, vocab_size: int) -> LoadPlan:
        rows = rescaled(
            self.rows,
            rate_factor=rate_factor,
            length_factor=self.length_factor,
            max_prompt_tokens=self.max_prompt_tokens,
            max_output_tokens=self.max_output_tokens,
            duration_s=duration_s,
        )
        about: dict[str, object] = {
            "trace": self.name,
            "rate_factor": rate_factor,
            "length_factor": self.length_factor,
            "max_prompt_tokens": self.max_prompt_tokens,
            "max_output_tokens": self.max_output_tokens,
            "duration_s": duration_s,
        }
        return trace_plan(rows, seed, vocab_size, about=about)


@dataclass(frozen=True, slots=True)
class MixLoad:
    mix: Mix

    @property
    def name(self) -> str:
        return self.mix.name

    def plan(self, rate_factor: float, duration_s: float, seed: int, vocab_size: int) -> LoadPlan:
        return make_plan(self.mix, duration_s, seed, vocab_size, rate_factor)


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """`folder` keeps every run, so that a study that was broken off goes on. `chunks`: those that colocated fleets try,
    `prefill_chunks`: those of the fleets apart.

    `num_blocks`: KV blocks of each fleet in all. `peers`: other servers to measure beside ours. `serve_flags`: further
    words for every `pdserve serve`. `num_checked`: answers of each run that are compared with the engine's own.
    """

    folder: Path
    load: MixLoad | TraceLoad
    source: Path
    seed: int
    cores: tuple[int, ...]
    vocab_size: int
    rate_factors: tuple[float, ...] = (1.0, 1.75)
    duration_s: float = 30.0
    pilot_s: float = 20.0
    num_repeats: int = 2
    num_prefill: int = 1
    num_decode: int = 1
    prefill_chunks: tuple[int, ...] = (128, 256, 512)
    chunks: tuple[int, ...] = CHUNKS
    num_blocks: int = 3000
    drain_s: float = 60.0
    slo: Slo = field(default_factory=Slo)
    num_checked: int = 2
    dtype: str = "bfloat16"
    peers: tuple[FleetSpec, ...] = ()
    serve_flags: Sequence[str] = ()

    def __post_init__(self) -> None:
        for what, value in (("rate factors", len(self.rate_factors)), ("repeats", self.num_repeats)):
            if value < 1:
                raise ValueError(f"{what}: at least 1")
        for what, seconds in (("the duration", self.duration_s), ("the pilot's duration", self.pilot_s)):
            if not seconds > 0:
                raise ValueError(f"{what} must be above 0 s, not {seconds:g}")
        if not self.chunks or not self.prefill_chunks or min(*self.chunks, *self.prefill_chunks) < 1:
            raise ValueError(f"chunks {self.chunks} and {self.prefill_chunks}: at least one of each, all above 0")
        if self.num_prefill + self.num_decode > len(self.cores):
            raise ValueError(
                f"{self.num_prefill} prefill and {self.num_decode} decode workers need a core each; there are "
                f"{len(self.cores)}"
            )

    @property
    def protocol(self) -> Literal["http", "grpc"]:
        """gRPC tells where time went; beside peers all are asked over the API that they share."""
        return "http" if self.peers else "grpc"

    def plans(self) -> dict[float, list[LoadPlan]]:
        """By rate factor, one for each repeat, all of different seeds."""
        return {
            rate: [self._plan(rate, self.duration_s, f"repeat {repeat}") for repeat in range(self.num_repeats)]
            for rate in self.rate_factors
        }

    def pilot_plan(self) -> LoadPlan:
        """At the highest rate: there candidates differ."""
        return self._plan(max(self.rate_factors), self.pilot_s, _PILOT)

    def _plan(self, rate_factor: float, duration_s: float, use: str) -> LoadPlan:
        seed = derived_seed(self.seed, "study", f"{rate_factor:g}", use) % _SEEDS
        plan = self.load.plan(rate_factor, duration_s, seed, self.vocab_size)
        if not plan.requests:
            raise ValueError(f"{self.load.name} at rate x{rate_factor:g} sends nothing within {duration_s:g} s")
        return plan
