"""What a load is made of: streams of requests by class, their arrivals and lengths; and the plans made of it."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from statistics import NormalDist

import numpy as np

from pdserve_bench.load.arrivals import Arrivals, arrival_times, first_arrivals
from pdserve_bench.load.plan import LoadPlan, PlannedRequest
from pdserve_bench.load.prompts import PrefixPrompts, derived_seed, intended_hit_rate
from pdserve_bench.load.traces import TraceRow


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens from `low` to `high`, both included.

    Uniform; or, where `median` and `p90` are set, lognormal with those before it is rounded and clipped to the range.

    Raises:
        ValueError: the range is empty or begins below 1, or `p90` is not above a `median` above 0.
    """

    low: int
    high: int
    median: float | None = None
    p90: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"lengths must be at least 1 and rise, not {self.low} to {self.high}")
        if (self.median is None) != (self.p90 is None):
            raise ValueError("lognormal lengths need both median and p90")
        if self.median is not None and self.p90 is not None and not 0 < self.median < self.p90 < math.inf:
            raise ValueError(f"lengths need 0 < median < p90, not {self.median} and {self.p90}")

    @staticmethod
    def fixed(num_tokens: int) -> "Lengths":
        return Lengths(num_tokens, num_tokens)

    @staticmethod
    def uniform(low: int, high: int) -> "Lengths":
        return Lengths(low, high)

    @staticmethod
    def lognormal(median: float, p90: float, low: int, high: int) -> "Lengths":
        return Lengths(low, high, median, p90)

    @property
    def mean(self) -> float:
        """Exact, rounding and clipping included: of whole numbers, low + Σ P(length > k) over k from low below high."""
        log_length = self._log_length
        if log_length is None:
            return (self.low + self.high) / 2
        return self.low + sum(1 - log_length.cdf(math.log(k + 0.5)) for k in range(self.low, self.high))

    @property
    def _log_length(self) -> NormalDist | None:
        if self.median is None or self.p90 is None:
            return None
        return NormalDist(math.log(self.median), math.log(self.p90 / self.median) / NormalDist().inv_cdf(0.9))

    def draw(self, count: int, seed: int) -> list[int]:
        """`count` independent lengths."""
        rng, log_length = np.random.default_rng(seed), self._log_length
        if log_length is None:
            uniform: list[int] = rng.integers(self.low, self.high, count, endpoint=True).tolist()
            return uniform
        drawn = np.rint(rng.lognormal(log_length.mean, log_length.stdev, count))
        lengths: list[int] = np.clip(drawn, self.low, self.high).astype(np.int64).tolist()
        return lengths


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests of one class and tenant. Prompt lengths include the shared prefix, and are longer than it.

    `cancel_share`: share of requests whose client hangs up midway, after a number of tokens that is uniform between the
    first and the last but one (never with outputs of one token). `shared_prefix_tokens`: with how many tokens every
    prompt begins that others share, as with a system prompt; there are `num_prefixes` of them, each as likely.

    Raises:
        ValueError: a share outside 0 to 1, or prefixes that do not fit.
    """

    request_class: str
    arrivals: Arrivals
    prompt: Lengths
    output: Lengths
    tenant: str = ""
    cancel_share: float = 0.0
    shared_prefix_tokens: int = 0
    num_prefixes: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.cancel_share <= 1:
            raise ValueError(f"the share of cancelled requests must be from 0 to 1, not {self.cancel_share}")
        if self.shared_prefix_tokens < 0 or self.num_prefixes < 0:
            raise ValueError("the number of prefixes and that of their tokens must not be negative")
        if (self.shared_prefix_tokens > 0) != (self.num_prefixes > 0):
            raise ValueError("shared prefixes need both their number and their length")
        if self.shared_prefix_tokens >= self.prompt.low:
            raise ValueError(f"prompts from {self.prompt.low} tokens hold no prefix of {self.shared_prefix_tokens}")

    def mean_rate(self, rate_factor: float = 1.0) -> float:
        """Requests/s."""
        return self.arrivals.mean_rate * rate_factor

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return self.prompt.high + self.output.high


@dataclass(frozen=True, slots=True)
class Mix:
    """Streams that run at the same time, at least one. `about`: what the load stands for, in a sentence."""

    name: str
    streams: tuple[Stream, ...]
    about: str = ""

    def __post_init__(self) -> None:
        if not self.streams:
            raise ValueError(f"a mix has at least one stream, and {self.name!r} has none")


def make_plan(mix: Mix, duration_s: float, seed: int, vocab_size: int, rate_factor: float = 1.0) -> LoadPlan:
    """Every arrival in [0, `duration_s`), at `rate_factor` times the streams' rates.

    Each stream draws from a state of its own, named by its class, its tenant and its place among those of the same
    name: another stream, another rate or another order leave its requests what they were.

    Raises:
        ValueError: duration, factor or vocabulary out of range, or a stream whose requests all come at once.
    """
    requests: list[PlannedRequest] = []
    for stream, stream_seed in _with_seeds(mix.streams, seed):
        arrivals_seed = derived_seed(stream_seed, "arrivals")
        times = arrival_times(stream.arrivals.scaled(rate_factor), duration_s, arrivals_seed)
        requests += _requests(stream, times, stream_seed, vocab_size)
    about = {"kind": "mix", **_json(mix), "duration_s": duration_s, "rate_factor": rate_factor}
    return _plan(requests, seed, {**about, "vocab_size": vocab_size})


def counted_plan(stream: Stream, count: int, seed: int, vocab_size: int) -> LoadPlan:
    """The first `count` requests of a stream, whenever they come.

    Raises:
        ValueError: the vocabulary is too small, or `count` is negative.
    """
    ((_, stream_seed),) = _with_seeds((stream,), seed)
    times = first_arrivals(stream.arrivals, count, derived_seed(stream_seed, "arrivals"))
    about = {"kind": "counted", "stream": _json(stream), "count": count, "vocab_size": vocab_size}
    return _plan(_requests(stream, times, stream_seed, vocab_size), seed, about)


def trace_plan(
    rows: Sequence[TraceRow],
    seed: int,
    vocab_size: int,
    request_class: str = "trace",
    about: Mapping[str, object] | None = None,
) -> LoadPlan:
    """A request for each row. `about`: which trace and how it was rescaled, which the rows do not tell.

    Raises:
        ValueError: the vocabulary is too small, or rows differ in the length of their blocks.
    """
    block_lengths = {row.block_tokens for row in rows}
    if len(block_lengths) > 1:
        raise ValueError(f"rows of one trace must have blocks of one length, not of {sorted(block_lengths)} tokens")
    prompts = PrefixPrompts(derived_seed(seed, "trace"), vocab_size, min(block_lengths, default=1))
    requests = [
        PlannedRequest(
            number=number,
            at_s=row.at_s,
            token_ids=prompts.of(row.num_prompt_tokens, row.hash_ids),
            max_tokens=max(1, row.num_output_tokens),
            request_class=request_class,
        )
        for number, row in enumerate(rows)
    ]
    facts = {"num_rows": len(rows), "request_class": request_class, "vocab_size": vocab_size}
    return _plan(requests, seed, {"kind": "trace", **facts, **(about or {})})


def _with_seeds(streams: Iterable[Stream], seed: int) -> list[tuple[Stream, int]]:
    seen: Counter[tuple[str, str]] = Counter()
    seeded: list[tuple[Stream, int]] = []
    for stream in streams:
        name = (stream.request_class, stream.tenant)
        seeded.append((stream, derived_seed(seed, "stream", *name, seen[name])))
        seen[name] += 1
    return seeded


def _requests(stream: Stream, times: Sequence[float], seed: int, vocab_size: int) -> list[PlannedRequest]:
    """Their numbers are still to be given."""
    count = len(times)
    prompts = PrefixPrompts(derived_seed(seed, "prompts"), vocab_size, max(1, stream.shared_prefix_tokens))
    lengths = stream.prompt.draw(count, derived_seed(seed, "prompt lengths"))
    outputs = stream.output.draw(count, derived_seed(seed, "output lengths"))
    prefixes = _prefixes(stream, count, derived_seed(seed, "prefixes"))
    hang_ups = _hang_ups(stream, outputs, derived_seed(seed, "cancellations"))
    return [
        PlannedRequest(0, at_s, prompts.of(length, prefix), output, stream.request_class, stream.tenant, hang_up)
        for at_s, length, prefix, output, hang_up in zip(times, lengths, prefixes, outputs, hang_ups, strict=True)
    ]


def _prefixes(stream: Stream, count: int, seed: int) -> list[tuple[int, ...]]:
    if not stream.num_prefixes:
        return [()] * count
    return [(name,) for name in np.random.default_rng(seed).integers(stream.num_prefixes, size=count).tolist()]


def _hang_ups(stream: Stream, outputs: Sequence[int], seed: int) -> list[int | None]:
    """After how many tokens. Every request takes two draws, so that the share changes nobody else's."""
    draws: list[list[float]] = np.random.default_rng(seed).random((len(outputs), 2)).tolist()
    return [
        1 + int(place * (num_tokens - 1)) if chance < stream.cancel_share and num_tokens > 1 else None
        for (chance, place), num_tokens in zip(draws, outputs, strict=True)
    ]


def _plan(requests: Iterable[PlannedRequest], seed: int, about: Mapping[str, object]) -> LoadPlan:
    ordered = sorted(requests, key=attrgetter("at_s"))
    numbered = tuple(replace(request, number=number) for number, request in enumerate(ordered))
    return LoadPlan(numbered, seed, about, intended_hit_rate([request.token_ids for request in numbered]))


def _json(value: Mix | Stream) -> dict[str, object]:
    """An endless rate is written as text, since JSON has no infinity."""
    return asdict(value, dict_factory=lambda items: {k: str(v) if v == math.inf else v for k, v in items})
