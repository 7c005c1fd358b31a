"""A run in the shape that `vllm bench serve --save-result --save-detailed` writes. Owns that shape, not the figures.

The keys are vLLM's. What they mean differs here, so as to hide nothing:

- TTFT ends with the first chunk that carries a token; latencies begin at the scheduled send time, not at the send
  itself. `*_ttft_from_send_ms` and `*_e2el_from_send_ms` are the latter; `start_times` are the scheduled ones.
- ITL is per token, 0 between tokens of one chunk, not per chunk; `num_itl_per_event` counts the completed requests
  whose chunks do not say how many tokens they hold. E2EL ends with the last token.
- Tokens are all that came within the run, of failed requests too; prompts count where a first token came. vLLM counts
  completed requests only.
- `failed` holds refused requests, as vLLM's does, and `rejected` says how many; `cancelled` (as planned) and
  `unfinished` stand apart. With `completed` the three add up to `num_prompts`.
- `request_goodput` is vLLM's: completed requests within the SLOs (mean TPOT, 0 for a single token) a second.
  `goodput` is ours: the share of offered requests that met TTFT and their own p99 ITL, and were not found wrong.
- A figure without samples is null, where vLLM writes 0.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime

import numpy as np

from pdserve_bench.load.records import Outcome, RequestRecord, RunResult
from pdserve_bench.measures.summarise import (
    completed_of,
    num_itl_per_event,
    num_output_tokens_received,
    num_prompt_tokens_done,
)
from pdserve_bench.measures.summary import Distribution, Summary
from pdserve_bench.measures.vllm_flags import DEFAULT_OPTIONS, VllmOptions, VllmSlo, parse_goodput

__all__ = ["parse_goodput", "request_goodput", "vllm_result"]


def vllm_result(
    run: RunResult,
    summary: Summary,
    *,
    request_rate: float,
    burstiness: float,
    max_concurrency: int | None,
    model: str,
    options: VllmOptions = DEFAULT_OPTIONS,
) -> dict[str, object]:
    """JSON without NaN or infinity; an infinite `request_rate` is "inf", as in vLLM. `summary`: of the whole run."""
    return {
        "date": datetime.fromtimestamp(run.begin_unix_s, UTC).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": run.name,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": summary.offered,
        "request_rate": _finite(request_rate),
        "burstiness": _finite(burstiness),
        "max_concurrency": max_concurrency,
        **_totals(run, summary, options.goodput),
        **_latencies(run.records, options),
        **(_details(run.records) if options.detailed else {}),
    }


def request_goodput(run: RunResult, slo: VllmSlo) -> float:
    """Completed requests a second that meet `slo`; what was found wrong counts, as it does in vLLM."""
    num_good = sum(_meets(record, slo) for record in completed_of(run.records))
    return num_good / run.duration_s if run.duration_s > 0 else 0.0


def _meets(record: RequestRecord, slo: VllmSlo) -> bool:
    tpot_s = 0.0 if record.tpot_s is None else record.tpot_s
    pairs = ((record.ttft_s, slo.ttft), (tpot_s, slo.tpot), (record.e2e_s, slo.e2el))
    return all(bound is None or (value_s is not None and value_s * 1000 <= bound) for value_s, bound in pairs)


def _totals(run: RunResult, summary: Summary, slo: VllmSlo | None) -> dict[str, object]:
    return {
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed + summary.rejected,
        "rejected": summary.rejected,
        "cancelled": summary.cancelled,
        "unfinished": summary.unfinished,
        "total_input_tokens": num_prompt_tokens_done(run.records, run.duration_s),
        "total_output_tokens": num_output_tokens_received(run.records, run.duration_s),
        "request_throughput": summary.request_throughput,
        "request_goodput": None if slo is None else request_goodput(run, slo),
        "goodput": summary.goodput,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.prompt_throughput + summary.output_throughput,
        "max_output_tokens_per_s": _peak_tokens_per_s(run),
        "max_concurrent_requests": run.limits.peak_in_flight,
        "num_count_mismatches": summary.num_count_mismatches,
        "num_itl_per_event": num_itl_per_event(run.records),
    }


def _peak_tokens_per_s(run: RunResult) -> float:
    """Tokens by their events' counts in the fullest second, seconds counted from the run's begin."""
    events = [event for record in run.records for event in record.events if 0.0 <= event.at_s <= run.duration_s]
    if not events:
        return 0.0
    seconds = np.array([int(event.at_s) for event in events])
    return float(np.bincount(seconds, weights=[event.num_tokens for event in events]).max())


def _latencies(records: Sequence[RequestRecord], options: VllmOptions) -> dict[str, float | None]:
    completed = completed_of(records)
    found: dict[str, float | None] = {}
    for metric in options.percentile_metrics:
        for name in (metric, f"{metric}_from_send"):
            if name in _SAMPLES:
                found |= _figures(name, _SAMPLES[name](completed), options.metric_percentiles)
    return found


def _figures(name: str, samples_s: Sequence[float], percentiles: tuple[float, ...]) -> dict[str, float | None]:
    found = Distribution.of(samples_s, (50.0, *percentiles))
    values = {"mean": found.mean, "median": found.median, "std": found.std}
    values |= {f"p{percent}".removesuffix(".0"): found.percentiles.get(percent) for percent in percentiles}
    return {f"{key}_{name}_ms": None if value is None else value * 1000 for key, value in values.items()}


def _known(samples: Iterable[float | None]) -> list[float]:
    return [sample for sample in samples if sample is not None]


def _e2e_from_send_s(record: RequestRecord) -> float | None:
    return record.events[-1].at_s - record.sent_s if record.events and record.sent_s is not None else None


_SAMPLES: Mapping[str, Callable[[Sequence[RequestRecord]], list[float]]] = {
    "ttft": lambda records: _known(record.ttft_s for record in records),
    "ttft_from_send": lambda records: _known(record.ttft_from_send_s for record in records),
    "tpot": lambda records: _known(record.tpot_s for record in records),
    "itl": lambda records: [itl_s for record in records for itl_s in record.itls_s],
    "e2el": lambda records: _known(record.e2e_s for record in records),
    "e2el_from_send": lambda records: _known(_e2e_from_send_s(record) for record in records),
}


def _details(records: Sequence[RequestRecord]) -> dict[str, object]:
    return {
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens for record in records],
        "ttfts": [record.ttft_s for record in records],
        "itls": [record.itls_s for record in records],
        "start_times": [record.scheduled_s for record in records],
        "send_times": [record.sent_s for record in records],
        "generated_texts": [record.output for record in records],
        "errors": [_error(record) for record in records],
    }


def _error(record: RequestRecord) -> str:
    """Empty only for what completed: existing tooling takes an empty one for success."""
    return "" if record.outcome is Outcome.COMPLETED else record.error or record.outcome.value


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
