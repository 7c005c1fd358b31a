"""What one configuration's measurement gave: plain values that travel between processes and into the result file."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from pdserve_bench.engine.plan import Configuration


@dataclass(frozen=True, slots=True)
class Limits:
    """What this machine can do with these threads. `model_flops_per_s`: of torch's products with the
    model's own matrices, at 512 rows. `foreign_cores`: while that was measured."""

    bytes_per_s: float
    flops_per_s: float
    model_flops_per_s: float
    foreign_cores: float

    def best(self, other: "Limits") -> "Limits":
        return Limits(
            max(self.bytes_per_s, other.bytes_per_s),
            max(self.flops_per_s, other.flops_per_s),
            max(self.model_flops_per_s, other.model_flops_per_s),
            min(self.foreign_cores, other.foreign_cores),
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """Of several timings, seconds."""

    num: int
    median_s: float
    p10_s: float
    p90_s: float
    min_s: float

    @classmethod
    def of(cls, times_s: Sequence[float]) -> "Spread":
        deciles = quantiles(times_s, n=10, method="inclusive") if len(times_s) > 1 else [times_s[0]] * 9
        return cls(len(times_s), median(times_s), deciles[0], deciles[-1], min(times_s))


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the time went; together 1. `model_rest`: norms, rotation, KV write. `python`: what the runner does around
    the model and the sampler, and the way to the model and back."""

    gemm: float
    attention: float
    sampling: float
    model_rest: float
    python: float

    @classmethod
    def of(
        cls, total_s: float, *, gemm_s: float, attention_s: float, sampling_s: float, model_rest_s: float
    ) -> "Shares":
        """Of steps that took `total_s` in all; what is left of that is Python's."""
        python_s = total_s - gemm_s - attention_s - sampling_s - model_rest_s
        return cls(
            gemm_s / total_s, attention_s / total_s, sampling_s / total_s, model_rest_s / total_s, python_s / total_s
        )

    @property
    def outside(self) -> float:
        """All but GEMM and attention."""
        return self.sampling + self.model_rest + self.python


@dataclass(frozen=True, slots=True)
class DecodeCell:
    """One decode step of `batch` sequences that see `context` tokens."""

    batch: int
    context: int
    step: Spread
    bytes_read: int
    shares: Shares | None
    foreign_cores: float
    num_tries: int

    def floor_s(self, limits: Limits) -> float:
        return self.bytes_read / limits.bytes_per_s

    def floors(self, limits: Limits) -> float:
        """Measured time as a multiple of the floor."""
        return self.step.median_s / self.floor_s(limits)


@dataclass(frozen=True, slots=True)
class PrefillCell:
    """One prompt of `num_tokens` tokens, alone, in chunks of `chunk`."""

    num_tokens: int
    chunk: int
    prompt: Spread
    flops: int
    shares: Shares | None
    foreign_cores: float
    num_tries: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.prompt.median_s

    def floor_s(self, limits: Limits) -> float:
        return self.flops / limits.flops_per_s

    def ceiling_share(self, limits: Limits) -> float:
        """Of the rate that the GEMMs alone would allow."""
        return self.floor_s(limits) / self.prompt.median_s


@dataclass(frozen=True, slots=True)
class ConfigurationResult:
    """All cells of one configuration. `kv_bytes_per_token` and `weight_bytes`: as a decode step reads them.

    `kv_inner_order` tells which kernels ran: see `KvLayout`.
    """

    configuration: Configuration
    model_name: str
    fingerprint: str
    evaluation_id: str
    kv_inner_order: str
    weight_bytes: int
    kv_bytes_per_token: int
    flops_per_token: int
    limits: Limits
    decode: tuple[DecodeCell, ...]
    prefill: tuple[PrefillCell, ...]

    @property
    def foreign_cores(self) -> float:
        """The most during any of its measurements."""
        decode = [cell.foreign_cores for cell in self.decode]
        return max([self.limits.foreign_cores, *decode, *(cell.foreign_cores for cell in self.prefill)])
