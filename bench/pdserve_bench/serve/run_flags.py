"""From the flags of `bench serve` to how a run or a search is done, judged and written."""

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from pdserve_bench.load.generator import RunOptions
from pdserve_bench.measures.summary import Slo
from pdserve_bench.measures.vllm_flags import (
    VllmOptions,
    parse_goodput,
    parse_metric_percentiles,
    parse_percentile_metrics,
)
from pdserve_bench.serve.files import Outputs, VllmFile
from pdserve_bench.serve.flags import LoadFlags
from pdserve_bench.serve.options import DEFAULT_DURATION_S, Load
from pdserve_bench.serve.run import Search, ServeOptions
from pdserve_bench.serve.search import SearchConfig
from pdserve_bench.serve.verdict import Tolerance

_SEED_BITS = 32
_MAX_RATE = 1000.0
_FEWEST_REQUESTS = 5
"""A run of a search offers at least so many on average: with fewer, its goodput says nothing."""

T = TypeVar("T")
Given = TypeVar("Given")


def taken(kind: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass from those of `values` that are its fields."""
    return kind(**{field.name: values[field.name] for field in fields(kind)})  # type: ignore[arg-type]


def new_seed(seed: int | None) -> int:
    """A new one where none is given, so that a second run does not find the first one's prompts in a cache."""
    return secrets.randbits(_SEED_BITS) if seed is None else seed


def outputs_of(flags: Mapping[str, Any], seed: int) -> Outputs:
    """`flags`: every flag by its name. All but the key are kept as settings."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    settings["api_key"] = "***" if settings["api_key"] else ""
    return Outputs(flags["json_file"], flags.get("csv_file"), flags["html_file"], {**settings, "seed": seed}, seed)


@dataclass(frozen=True, slots=True)
class RunFlags:
    """As given. Times in ms where they say so, else in seconds."""

    seed: int | None
    max_concurrency: int | None
    drain: float
    num_warmups: int
    goodput: list[str] | None
    more_goodput: list[str] | None
    percentile_metrics: str
    metric_percentiles: str
    save_result: bool
    result_dir: Path
    slo_ttft_ms: float
    slo_itl_ms: float
    check_outputs: int
    max_failures: int
    allow_cached: bool
    search: bool
    min_goodput: float
    repeats: int

    def options(self, seed: int) -> ServeOptions:
        """Raises ValueError naming the flag that is wrong."""
        return ServeOptions(
            seed=seed,
            run=RunOptions(self.max_concurrency, self.drain),
            slo=Slo(self.slo_ttft_ms / 1e3, self.slo_itl_ms / 1e3),
            tolerance=Tolerance(self.max_failures, self.allow_cached),
            num_warmups=self.num_warmups,
            num_checked=self.check_outputs,
        )

    def vllm_file(self, load: Load, burstiness: float | None) -> VllmFile | None:
        """None: none was asked for. Raises ValueError naming the flag that is wrong."""
        options = self._vllm_options()
        if not self.save_result:
            return None
        if self.search:
            raise ValueError("--save-result has no effect on --search")
        shape = 1.0 if burstiness is None else burstiness
        return VllmFile(self.result_dir, load.rate, shape, self.max_concurrency, options)

    def asked(self, load: Load, flags: LoadFlags) -> Search | None:
        """None: no search. Raises ValueError naming the flag that is wrong."""
        if not self.search:
            return None
        if flags.num_prompts is not None:
            raise ValueError("--num-prompts has no effect on --search: every run lasts for --duration")
        duration_s = DEFAULT_DURATION_S if flags.duration is None else flags.duration
        start = load.rate if math.isfinite(load.rate) else 1.0
        lowest = min(start, _FEWEST_REQUESTS / duration_s)
        config = SearchConfig(start, lowest, max(_MAX_RATE, start), self.min_goodput, repeats=self.repeats)
        asked = Search(config, load, duration_s)
        asked.plan(start, 0, 0)
        return asked

    def _vllm_options(self) -> VllmOptions:
        if self.more_goodput and not self.goodput:
            raise ValueError(f"unexpected argument {self.more_goodput[0]}")
        pairs = [*(self.goodput or ()), *(self.more_goodput or ())]
        return VllmOptions(
            percentile_metrics=_parsed("--percentile-metrics", parse_percentile_metrics, self.percentile_metrics),
            metric_percentiles=_parsed("--metric-percentiles", parse_metric_percentiles, self.metric_percentiles),
            goodput=_parsed("--goodput", parse_goodput, pairs) if pairs else None,
        )


def _parsed(flag: str, parse: Callable[[Given], T], given: Given) -> T:
    try:
        return parse(given)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
