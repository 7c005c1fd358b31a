"""From the flags of `bench serve` to the load that they mean. A flag without effect is wrong usage."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, TypeVar

from pdserve_bench.load.arrivals import Arrivals
from pdserve_bench.load.mixes import Lengths, Stream
from pdserve_bench.load.presets import PRESETS
from pdserve_bench.serve.options import DEFAULT_DURATION_S, Load, PresetLoad, RandomLoad, TraceLoad

T = TypeVar("T")

_SOURCES = ("dataset_name", "dataset_path", "trace", "preset", "vocab_size", "duration")
_OF_RANDOM = {"num_prompts", "input_len", "output_len", "request_rate", "burstiness", "ramp_to"}
_OF_TRACE = {"num_prompts", "rate_factor", "length_factor", "max_input_len", "max_output_len"}
_OF_PRESET = {"rate_factor"}


@dataclass(frozen=True, slots=True)
class LoadFlags:
    """As given; None: not given. Times in seconds, rates in requests/s."""

    dataset_name: str | None = None
    dataset_path: str | None = None
    trace: str | None = None
    preset: str | None = None
    num_prompts: int | None = None
    duration: float | None = None
    input_len: str | None = None
    output_len: str | None = None
    request_rate: str | None = None
    burstiness: float | None = None
    ramp_to: float | None = None
    rate_factor: float | None = None
    length_factor: float | None = None
    max_input_len: int | None = None
    max_output_len: int | None = None
    vocab_size: int = 32000

    def load(self) -> Load:
        """Raises ValueError naming the flag that is wrong. OSError: a trace cannot be read."""
        if self.duration is not None and not 0 < self.duration < math.inf:
            raise ValueError(f"--duration {self.duration:g}: expected seconds above 0")
        kind, name = self._source()
        if kind == "random":
            self._only(_OF_RANDOM, "random prompts")
            return RandomLoad(self._stream(), self.num_prompts, self.duration, self.vocab_size)
        if kind == "preset":
            self._only(_OF_PRESET, f"the preset {name}")
            duration_s = DEFAULT_DURATION_S if self.duration is None else self.duration
            return PresetLoad(name, self._or_one(self.rate_factor), duration_s, self.vocab_size)
        self._only(_OF_TRACE, "a trace")
        return TraceLoad(
            source=name,
            rate_factor=self._or_one(self.rate_factor),
            length_factor=self._or_one(self.length_factor),
            max_prompt_tokens=4096 if self.max_input_len is None else self.max_input_len,
            max_output_tokens=512 if self.max_output_len is None else self.max_output_len,
            num_prompts=self.num_prompts,
            duration_s=self.duration,
            vocab_size=self.vocab_size,
        )

    @property
    def rate(self) -> float:
        """Of --request-rate, by default infinite as in vLLM's benchmark. Raises ValueError naming it."""
        try:
            rate = math.inf if self.request_rate is None else float(self.request_rate)
        except ValueError:
            rate = math.nan
        if not rate > 0:
            raise ValueError(f"--request-rate {self.request_rate}: expected requests/s above 0, or inf")
        return rate

    def _source(self) -> tuple[Literal["random", "trace", "preset"], str]:
        named = {flag: value for flag in _SOURCES[1:4] if (value := getattr(self, flag)) is not None}
        if len(named) > 1:
            raise ValueError(f"{' and '.join(map(_shown, named))} exclude each other")
        flag, name = next(iter(named.items()), ("dataset_name", self.dataset_name or "random"))
        if flag in ("dataset_path", "trace"):
            if self.dataset_name not in (None, "trace"):
                raise ValueError(f"{_shown(flag)} is of --dataset-name trace, not {self.dataset_name}")
            return "trace", name
        if flag == "preset" and self.dataset_name not in (None, name):
            raise ValueError(f"--preset {name} and --dataset-name {self.dataset_name} exclude each other")
        if name == "random":
            return "random", name
        if name == "trace":
            raise ValueError(
                "--dataset-name trace needs --dataset-path FILE, or --trace with a file or a sample's name"
            )
        if name not in PRESETS:
            known = ", ".join(PRESETS) if flag == "preset" else f"random, trace, {', '.join(PRESETS)}"
            raise ValueError(f"{_shown(flag)} {name}: expected one of {known}")
        return "preset", name

    def _only(self, allowed: set[str], what: str) -> None:
        for one in fields(self):
            if one.name not in allowed and one.name not in _SOURCES and getattr(self, one.name) is not None:
                raise ValueError(f"{_shown(one.name)} has no effect on {what}")

    def _stream(self) -> Stream:
        rate, burstiness = self.rate, self._or_one(self.burstiness)
        kind: Literal["poisson", "gamma", "ramp"] = "poisson" if burstiness == 1 else "gamma"
        try:
            arrivals = Arrivals("ramp" if self.ramp_to is not None else kind, rate, burstiness, self.ramp_to)
        except ValueError as error:
            raise ValueError(f"--request-rate, --burstiness, --ramp-to: {error}") from None
        if self.duration is not None and math.isinf(rate):
            raise ValueError("--duration needs a --request-rate: requests that all come at once need --num-prompts")
        prompt, output = (
            lengths(self.input_len or "1024", "--input-len"),
            lengths(self.output_len or "128", "--output-len"),
        )
        return Stream("default", arrivals, prompt, output)

    @staticmethod
    def _or_one(factor: float | None) -> float:
        return 1.0 if factor is None else factor


def lengths(text: str, flag: str) -> Lengths:
    """From "128", or "64-192" for a uniform range. Raises ValueError naming the flag."""
    low, dash, high = text.partition("-")
    try:
        return Lengths.uniform(int(low), int(high if dash else low))
    except ValueError:
        raise ValueError(f"{flag} {text}: expected a number of tokens above 0, or a range such as 64-192") from None


def listed(text: str, flag: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    """From "0.5,1,2". Raises ValueError naming the flag."""
    try:
        return tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} {text}: expected numbers with commas between them") from None


def _shown(flag: str) -> str:
    return "--" + flag.replace("_", "-")
