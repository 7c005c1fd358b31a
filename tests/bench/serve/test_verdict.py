"""When a run ends with an exit code other than 0, and what it says."""

from dataclasses import replace

import pytest

from pdserve_bench.load.plan import LoadPlan, PlannedRequest
from pdserve_bench.load.records import ClientLimits, Outcome, RequestRecord, RunResult, ServerSample, TokenEvent
from pdserve_bench.measures.summarise import summarise
from pdserve_bench.measures.summary import Slo, Summary
from pdserve_bench.serve.verdict import (
    EXIT_CACHED,
    EXIT_FAILURES,
    EXIT_INTERRUPTED,
    HitRate,
    Tolerance,
    common_errors,
    hit_rate,
    judge,
)


def record(number: int, outcome: Outcome, cached: int | None = 0, error: str = "") -> RequestRecord:
    return RequestRecord(
        number=number,
        request_class="default",
        tenant="",
        num_prompt_tokens=100,
        max_tokens=2,
        scheduled_s=0.0,
        outcome=outcome,
        sent_s=0.0,
        events=(TokenEvent(0.1, 2),),
        num_output_tokens=2,
        num_counted_tokens=2,
        num_cached_tokens=cached,
        error=error,
    )


def run(records: list[RequestRecord], samples: tuple[ServerSample, ...] = ()) -> RunResult:
    return RunResult("run", {}, 0.0, 1.0, tuple(records), ClientLimits(0, 0, 0, 0, 1), samples=samples)


def summary(records: list[RequestRecord], wrong: tuple[int, ...] = ()) -> Summary:
    return summarise(run(records), Slo(), wrong=wrong)


GOOD = [record(number, Outcome.COMPLETED) for number in range(80)]
FRESH = HitRate(0.0, 0.0)


@pytest.mark.parametrize(("max_failures", "code"), [(0, EXIT_FAILURES), (14, EXIT_FAILURES), (15, 0), (100, 0)])
def test_failures_above_the_limit_are_an_exit_code(max_failures: int, code: int) -> None:
    bad = [record(80 + number, Outcome.FAILED if number < 12 else Outcome.REJECTED) for number in range(15)]
    left = [record(95 + number, Outcome.UNFINISHED) for number in range(5)]
    verdict = judge(summary(GOOD + bad + left), FRESH, Tolerance(max_failures))
    assert verdict.exit_code == code
    (told,) = verdict.faults if code else verdict.notes
    assert told.startswith("12 failed, 3 rejected, 0 wrong of 100 requests: 15, of which --max-failures allows")


def test_a_wrong_answer_counts_as_a_failure() -> None:
    assert judge(summary(GOOD, wrong=(3,)), FRESH, Tolerance()).exit_code == EXIT_FAILURES
    assert judge(summary(GOOD, wrong=(3,)), FRESH, Tolerance(1)).exit_code == 0


@pytest.mark.parametrize(
    ("intended", "measured", "code", "told"),
    [
        (0.0, None, 0, ""),
        (0.0, 0.009, 0, ""),
        (0.0, 0.011, EXIT_CACHED, "THE PREFIX CACHE WAS MEASURED: hit rate intended 0.0%, measured 1.1%"),
        (0.5, 0.519, 0, ""),
        (0.5, 0.521, EXIT_CACHED, "THE PREFIX CACHE WAS MEASURED"),
        (0.5, 0.481, 0, ""),
        (0.5, 0.479, 0, "the prefix cache found less"),
    ],
)
def test_a_cache_that_found_too_much_is_an_exit_code(
    intended: float, measured: float | None, code: int, told: str
) -> None:
    found = HitRate(intended, measured)
    verdict = judge(summary(GOOD), found, Tolerance())
    assert verdict.exit_code == code
    assert [line.startswith(told) for line in verdict.faults + verdict.notes] == ([True] if told else [])
    assert judge(summary(GOOD), found, Tolerance(allow_cached=True)).exit_code == 0


def test_an_interrupted_run_says_so_before_all_else() -> None:
    verdict = judge(summary([record(0, Outcome.FAILED)]), HitRate(0, 1), Tolerance(), interrupted=True)
    assert verdict.exit_code == EXIT_INTERRUPTED
    assert len(verdict.faults) == 3


def test_what_was_intended_is_of_the_requests_that_were_completed() -> None:
    """Three prompts that begin alike: of all, 2 x 16 of 60 tokens can be found; of the first alone, nothing."""
    prompts = [(*range(16), *range(100 * number, 100 * number + 4)) for number in range(1, 4)]
    plan = LoadPlan(
        tuple(PlannedRequest(number, 0.0, prompt, 2) for number, prompt in enumerate(prompts)), 7, {}, 32 / 60
    )
    records = [record(number, Outcome.COMPLETED) for number in range(3)]
    assert hit_rate(plan, run(records), summary(records)).intended == pytest.approx(32 / 60)
    cut = [records[0], replace(records[1], outcome=Outcome.UNFINISHED)]
    assert hit_rate(plan, run(cut), summary(cut)) == HitRate(0.0, 0.0)


def test_metrics_tell_the_hit_rate_where_answers_do_not() -> None:
    silent = [record(0, Outcome.COMPLETED, cached=None)]
    plan = LoadPlan((PlannedRequest(0, 0.0, (1,) * 100, 2),), 7)
    before = {"vllm:prefix_cache_queries_total": 1000.0, "vllm:prefix_cache_hits_total": 900.0}
    after = {"vllm:prefix_cache_queries_total": 1200.0, "vllm:prefix_cache_hits_total": 950.0}
    samples = (ServerSample(0, before), ServerSample(1, {}), ServerSample(2, after))
    assert hit_rate(plan, run(silent, samples), summary(silent)) == HitRate(0.0, 0.25)
    assert hit_rate(plan, run(silent, samples[:1]), summary(silent)) == HitRate(0.0, None)
    assert hit_rate(plan, run(silent), summary(silent)) == HitRate(0.0, None)
    assert hit_rate(plan, run(GOOD, samples), summary(GOOD)) == HitRate(0.0, 0.0)


def test_the_commonest_errors_come_first() -> None:
    errors = ["b", "a", "c", "a", "d", "b", "a", ""]
    records = [record(number, Outcome.FAILED, error=error) for number, error in enumerate(errors)]
    assert common_errors(records) == ["3x a", "2x b", "1x c"]
