"""The figures of a run's parts: by class, tenant, finish reason, and length. Each part keeps what failed in it."""

from bisect import bisect_left
from collections.abc import Callable, Collection

from pdserve_bench.load.records import RequestRecord, RunResult
from pdserve_bench.measures.summarise import summarise
from pdserve_bench.measures.summary import Slo, Summary

BUCKET_ENDS = (128, 512, 2048)
"""The most tokens that each bucket of lengths holds; one more bucket holds whatever is longer."""


def by_class(run: RunResult, slo: Slo, wrong: Collection[int] = ()) -> dict[str, Summary]:
    return _by(lambda record: record.request_class, run, slo, wrong)


def by_tenant(run: RunResult, slo: Slo, wrong: Collection[int] = ()) -> dict[str, Summary]:
    """Under "" those without a tenant."""
    return _by(lambda record: record.tenant, run, slo, wrong)


def by_finish_reason(run: RunResult, slo: Slo, wrong: Collection[int] = ()) -> dict[str, Summary]:
    """Under "" those that got none: refused, broken off, or left over."""
    return _by(lambda record: record.finish_reason, run, slo, wrong)


def by_prompt_bucket(run: RunResult, slo: Slo, wrong: Collection[int] = ()) -> dict[str, Summary]:
    """By prompt tokens, shortest first; buckets without requests are left out."""
    return _in_order(_by(lambda record: bucket(record.num_prompt_tokens), run, slo, wrong))


def by_output_bucket(run: RunResult, slo: Slo, wrong: Collection[int] = ()) -> dict[str, Summary]:
    """By the output tokens asked for, not those that came: else requests that failed would leave their bucket."""
    return _in_order(_by(lambda record: bucket(record.max_tokens), run, slo, wrong))


def bucket(num_tokens: int) -> str:
    """Such as "129-512", and "2049+" for the last.

    Raises:
        ValueError: `num_tokens` is negative.
    """
    if num_tokens < 0:
        raise ValueError(f"no bucket for {num_tokens} tokens")
    return _BUCKETS[bisect_left(BUCKET_ENDS, num_tokens)]


def _by(key: Callable[[RequestRecord], str], run: RunResult, slo: Slo, wrong: Collection[int]) -> dict[str, Summary]:
    groups: dict[str, list[RequestRecord]] = {}
    for record in run.records:
        groups.setdefault(key(record), []).append(record)
    return {name: summarise(run, slo, records=groups[name], wrong=wrong) for name in sorted(groups)}


def _in_order(buckets: dict[str, Summary]) -> dict[str, Summary]:
    return {name: buckets[name] for name in _BUCKETS if name in buckets}


def _bucket_names() -> tuple[str, ...]:
    begins = (0, *(end + 1 for end in BUCKET_ENDS))
    closed = (f"{begin}-{end}" for begin, end in zip(begins, BUCKET_ENDS, strict=False))
    return (*closed, f"{begins[-1]}+")


_BUCKETS = _bucket_names()
