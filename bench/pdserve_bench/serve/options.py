"""Which server is measured, under which load: values, checked when they are made. Sends nothing, reads only traces."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from pdserve_bench.load.mixes import Mix, Stream, counted_plan, make_plan, trace_plan
from pdserve_bench.load.plan import LoadPlan
from pdserve_bench.load.presets import preset
from pdserve_bench.load.traces import TraceRow, read_trace, rescaled, trace_path

DEFAULT_DURATION_S = 60.0
DEFAULT_NUM_PROMPTS = 1000
"""As in vLLM's benchmark."""


class CannotMeasureError(Exception):
    """What was asked for cannot be measured, as it turned out."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """`model` "": the first that the server serves. `address`: host:port of pdserve's gRPC, for that protocol.

    `server_pid`: of the process above all of the server's others; 0: not known, so that its CPU time is not, either.

    Raises:
        ValueError: the URL or the endpoint cannot be used.
    """

    base_url: str = "http://127.0.0.1:8000"
    endpoint: str = "/v1/completions"
    model: str = ""
    protocol: Literal["http", "grpc"] = "http"
    address: str = "127.0.0.1:50051"
    api_key: str = field(default="", repr=False)
    server_pid: int = 0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"--base-url {self.base_url}: expected http://HOST:PORT")
        if not self.endpoint.rstrip("/").endswith("/completions") or self.endpoint.rstrip("/").endswith(
            "/chat/completions"
        ):
            raise ValueError(f"--endpoint {self.endpoint}: expected one that takes completions, as /v1/completions")


@dataclass(frozen=True, slots=True)
class RandomLoad:
    """Fresh prompts of one class. Either `num_prompts` of them, or all that arrive in `duration_s`."""

    stream: Stream
    num_prompts: int | None = None
    duration_s: float | None = None
    vocab_size: int = 32000

    def __post_init__(self) -> None:
        if self.num_prompts is not None and self.duration_s is not None:
            raise ValueError("--num-prompts and --duration exclude each other")
        if self.num_prompts is not None and self.num_prompts < 1:
            raise ValueError(f"--num-prompts {self.num_prompts}: expected at least 1")

    @property
    def rate(self) -> float:
        """Requests/s; infinite where all come at once."""
        return self.stream.arrivals.mean_rate

    def at(self, rate: float, duration_s: float) -> "RandomLoad":
        arrivals = self.stream.arrivals
        scaled = replace(arrivals, rate=rate) if math.isinf(arrivals.rate) else arrivals.scaled(rate / self.rate)
        return replace(self, stream=replace(self.stream, arrivals=scaled), num_prompts=None, duration_s=duration_s)

    def plan(self, seed: int) -> LoadPlan:
        """Raises ValueError: all at once, but by duration; or the vocabulary is too small."""
        if self.duration_s is None:
            return counted_plan(self.stream, self.num_prompts or DEFAULT_NUM_PROMPTS, seed, self.vocab_size)
        return make_plan(Mix("random", (self.stream,)), self.duration_s, seed, self.vocab_size)


@dataclass(frozen=True, slots=True)
class PresetLoad:
    """A ready mix for `duration_s`, at `rate_factor` times its rates."""

    name: str
    rate_factor: float = 1.0
    duration_s: float = DEFAULT_DURATION_S
    vocab_size: int = 32000

    def __post_init__(self) -> None:
        preset(self.name)
        _check_factor("--rate-factor", self.rate_factor)

    @property
    def rate(self) -> float:
        return sum(stream.mean_rate(self.rate_factor) for stream in preset(self.name).streams)

    def at(self, rate: float, duration_s: float) -> "PresetLoad":
        return replace(self, rate_factor=self.rate_factor * rate / self.rate, duration_s=duration_s)

    def plan(self, seed: int) -> LoadPlan:
        return make_plan(preset(self.name), self.duration_s, seed, self.vocab_size, self.rate_factor)


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """Rows of a trace, by its sample's name or its path, rescaled to this machine."""

    source: str
    rate_factor: float = 1.0
    length_factor: float = 1.0
    max_prompt_tokens: int = 4096
    max_output_tokens: int = 512
    num_prompts: int | None = None
    duration_s: float | None = None
    vocab_size: int = 32000
    rows: tuple[TraceRow, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_factor("--rate-factor", self.rate_factor)
        _check_factor("--length-factor", self.length_factor)
        object.__setattr__(self, "rows", tuple(read_trace(trace_path(self.source))[: self.num_prompts]))

    @property
    def rate(self) -> float:
        """Requests/s on average; infinite where all come at once."""
        rows = self._rescaled()
        span_s = rows[-1].at_s
        return (len(rows) - 1) / span_s if span_s else math.inf

    def at(self, rate: float, duration_s: float) -> "TraceLoad":
        """As many of its first rows as there come in that time, so that they have that rate and no other; fewer, and
        for a shorter time, if the trace has no more."""
        first = replace(self, num_prompts=max(2, round(rate * duration_s)), duration_s=None)
        return replace(first, rate_factor=first.rate_factor * rate / first.rate) if math.isfinite(first.rate) else first

    def plan(self, seed: int) -> LoadPlan:
        about = {"trace": self.source, "rate_factor": self.rate_factor, "length_factor": self.length_factor}
        return trace_plan(self._rescaled(), seed, self.vocab_size, about={**about, "duration_s": self.duration_s})

    def _rescaled(self) -> list[TraceRow]:
        return rescaled(
            self.rows,
            rate_factor=self.rate_factor,
            length_factor=self.length_factor,
            max_prompt_tokens=self.max_prompt_tokens,
            max_output_tokens=self.max_output_tokens,
            duration_s=self.duration_s,
        )


Load = RandomLoad | PresetLoad | TraceLoad


def _check_factor(flag: str, factor: float) -> None:
    if not 0 < factor < math.inf:
        raise ValueError(f"{flag} {factor:g}: expected a number above 0")
