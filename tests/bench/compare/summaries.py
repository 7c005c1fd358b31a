"""Summaries for tests, with nothing in them but what a test is about."""

from pdserve_bench.measures.summary import Distribution, Summary


def summary_with(
    goodput: float = 1.0, itl_s: float | None = 0.05, ttft_s: float | None = 1.0, offered: int = 100
) -> Summary:
    """`itl_s` and `ttft_s`: every sample, and so every percentile."""
    nothing = Distribution.of([])
    num_good = round(goodput * offered)
    return Summary(
        offered=offered,
        completed=offered,
        failed=0,
        rejected=0,
        cancelled=0,
        unfinished=0,
        num_good=num_good,
        num_wrong=0,
        duration_s=10.0,
        request_throughput=offered / 10,
        prompt_throughput=100.0,
        output_throughput=50.0,
        goodput=goodput,
        ttft=nothing if ttft_s is None else Distribution.of([ttft_s]),
        ttft_from_send=nothing,
        itl=nothing if itl_s is None else Distribution.of([itl_s]),
        tpot=nothing,
        e2e=nothing,
        queue=nothing,
        cached_share=None,
        num_count_mismatches=0,
    )
