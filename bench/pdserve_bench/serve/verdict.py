"""What a run's figures oblige its command to say, and with which exit code to end. Prints nothing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve_bench.load.plan import LoadPlan
from pdserve_bench.load.prompts import intended_hit_rate
from pdserve_bench.load.records import Outcome, RequestRecord, RunResult
from pdserve_bench.measures.summary import Summary
from pdserve_bench.serve.series import rise

EXIT_FAILURES = 1
EXIT_CACHED = 3
EXIT_INTERRUPTED = 130

FRESH_MARGIN = 0.01
"""The most that a cache may find of prompts that are all fresh."""
CACHED_MARGIN = 0.02
"""How far the measured hit rate may lie from one that is intended."""

_SHOWN_ERRORS = 3
_QUERIES, _HITS = "prefix_cache_queries_total", "prefix_cache_hits_total"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """`max_failures`: requests that may fail, be refused or come out wrong. `allow_cached`: let a cache find more than
    was intended."""

    max_failures: int = 0
    allow_cached: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """`faults`: what makes the exit code other than 0, loudest first. `notes`: what to know besides."""

    exit_code: int
    faults: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HitRate:
    """Shares of prompt tokens, 0 to 1. `measured` None: the server does not say."""

    intended: float
    measured: float | None

    def __str__(self) -> str:
        measured = "the server does not say" if self.measured is None else f"measured {self.measured:.1%}"
        return f"intended {self.intended:.1%}, {measured}"

    @property
    def too_high(self) -> bool:
        """The run measured the cache more than it meant to."""
        margin = CACHED_MARGIN if self.intended else FRESH_MARGIN
        return self.measured is not None and self.measured > self.intended + margin

    @property
    def too_low(self) -> bool:
        return self.measured is not None and self.measured < self.intended - CACHED_MARGIN


def hit_rate(plan: LoadPlan, run: RunResult, summary: Summary) -> HitRate:
    """Over the completed requests; what was intended is worked out for those alone, where some are missing.

    Where no answer says how much was cached, the server's metrics do, if it has any.
    """
    completed = {record.number for record in run.records if record.outcome is Outcome.COMPLETED}
    intended = plan.intended_hit_rate
    if intended and len(completed) < len(plan.requests):
        intended = intended_hit_rate([one.token_ids for one in plan.requests if one.number in completed])
    return HitRate(intended, _by_metrics(run) if summary.cached_share is None else summary.cached_share)


def _by_metrics(run: RunResult) -> float | None:
    queries = rise(run.samples, [_QUERIES], _QUERIES)
    hits = rise(run.samples, [_HITS], _QUERIES)
    return hits / queries if queries and hits is not None else None


def judge(summary: Summary, cache: HitRate, tolerance: Tolerance, *, interrupted: bool = False) -> Verdict:
    faults: list[str] = []
    notes: list[str] = []
    code = 0
    if cache.too_high:
        told = f"THE PREFIX CACHE WAS MEASURED: hit rate {cache}: use another --seed or restart the server"
        (notes if tolerance.allow_cached else faults).append(told)
        code = 0 if tolerance.allow_cached else EXIT_CACHED
    elif cache.too_low:
        notes.append(f"the prefix cache found less than it might: hit rate {cache}")
    num_bad = summary.failed + summary.rejected + summary.num_wrong
    if num_bad:
        told = (
            f"{summary.failed} failed, {summary.rejected} rejected, {summary.num_wrong} wrong of {summary.offered} "
            f"requests: {num_bad}, of which --max-failures allows {tolerance.max_failures}"
        )
        (faults if num_bad > tolerance.max_failures else notes).append(told)
        code = EXIT_FAILURES if num_bad > tolerance.max_failures else code
    if interrupted:
        faults.append("interrupted: the figures are of what was measured until then")
        code = EXIT_INTERRUPTED
    return Verdict(code, tuple(faults), tuple(notes))


def common_errors(records: Sequence[RequestRecord]) -> list[str]:
    """The commonest errors, each with how often it came."""
    counts = Counter(record.error for record in records if record.error)
    return [f"{number}x {error}" for error, number in counts.most_common(_SHOWN_ERRORS)]
