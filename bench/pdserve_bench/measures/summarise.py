"""From a run's records to its figures. Judges no run against another, and writes nothing."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict

import numpy as np

from pdserve_bench.load.records import Outcome, RequestRecord, RunResult
from pdserve_bench.measures.summary import Distribution, Slo, Summary


def summarise(
    run: RunResult, slo: Slo, *, records: Sequence[RequestRecord] | None = None, wrong: Collection[int] = ()
) -> Summary:
    """The figures of `records`, which are some of the run's; of all of them by default.

    `wrong`: numbers of requests whose output was found wrong. Throughputs are 0 in a run without duration.
    """
    chosen = run.records if records is None else records
    wrong = frozenset(wrong)
    completed = completed_of(chosen)
    outcomes = Counter(record.outcome for record in chosen)
    num_good = sum(is_good(record, slo, wrong) for record in chosen)
    return Summary(
        offered=len(chosen),
        completed=outcomes[Outcome.COMPLETED],
        failed=outcomes[Outcome.FAILED],
        rejected=outcomes[Outcome.REJECTED],
        cancelled=outcomes[Outcome.CANCELLED],
        unfinished=outcomes[Outcome.UNFINISHED],
        num_good=num_good,
        num_wrong=sum(record.number in wrong for record in chosen),
        duration_s=run.duration_s,
        request_throughput=_per_second(len(completed), run.duration_s),
        prompt_throughput=_per_second(num_prompt_tokens_done(chosen, run.duration_s), run.duration_s),
        output_throughput=_per_second(num_output_tokens_received(chosen, run.duration_s), run.duration_s),
        goodput=num_good / len(chosen) if chosen else 0.0,
        ttft=Distribution.of(_known(record.ttft_s for record in completed)),
        ttft_from_send=Distribution.of(_known(record.ttft_from_send_s for record in completed)),
        itl=Distribution.of([itl for record in completed for itl in record.itls_s]),
        tpot=Distribution.of(_known(record.tpot_s for record in completed)),
        e2e=Distribution.of(_known(record.e2e_s for record in completed)),
        queue=Distribution.of([record.server.queue_s for record in completed if record.server is not None]),
        cached_share=_cached_share(completed),
        num_count_mismatches=sum(_is_mismatched(record) for record in chosen),
    )


def is_good(record: RequestRecord, slo: Slo, wrong: Collection[int] = ()) -> bool:
    """Whether an interactive user got what `slo` promises: completed, not wrong, TTFT and its own p99 ITL within it.

    A single token has no ITL to meet. A request that we cancelled as planned is judged by what came until then: it
    asked for no more, so that is no service that was withheld.
    """
    if record.outcome not in (Outcome.COMPLETED, Outcome.CANCELLED) or record.number in wrong:
        return False
    ttft_s, itl_s = record.ttft_s, itl_p99_s(record)
    return ttft_s is not None and ttft_s <= slo.ttft_s and (itl_s is None or itl_s <= slo.itl_s)


def itl_p99_s(record: RequestRecord) -> float | None:
    """Of the request's own gaps between tokens; None with fewer than two tokens."""
    itls_s = record.itls_s
    return float(np.percentile(itls_s, 99)) if itls_s else None


def completed_of(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Those that latencies are of."""
    return [record for record in records if record.outcome is Outcome.COMPLETED]


def num_prompt_tokens_done(records: Iterable[RequestRecord], duration_s: float) -> int:
    """Tokens of the prompts whose first output token came within the run, cached ones included."""
    firsts = ((record.events[0].at_s, record.num_prompt_tokens) for record in records if record.events)
    return sum(num_tokens for at_s, num_tokens in firsts if 0.0 <= at_s <= duration_s)


def num_output_tokens_received(records: Iterable[RequestRecord], duration_s: float) -> int:
    """Within the run, whatever became of the requests.

    As many as usage says; of a request that ran over the end, the share of its events' tokens that came before it.
    """
    return sum(_num_received(record, duration_s) for record in records)


def num_itl_per_event(records: Iterable[RequestRecord]) -> int:
    """Completed requests whose ITLs lie between events, not tokens: a figure that holds any must be labelled so.

    Their events do not say how many tokens they carry, and there were not as many of them as tokens.
    """
    return sum(
        not record.counts_are_exact and record.num_counted_tokens != record.num_output_tokens
        for record in completed_of(records)
    )


def summary_to_json(summary: Summary) -> dict[str, object]:
    """With percentiles under `p50`, `p99`…; None, never NaN, where there is no figure."""
    return {
        name: _distribution_to_json(value) if isinstance(value, Distribution) else value
        for name, value in ((name, getattr(summary, name)) for name in Summary.__dataclass_fields__)
    }


def _distribution_to_json(distribution: Distribution) -> dict[str, object]:
    plain = asdict(distribution)
    percentiles = plain.pop("percentiles")
    return plain | {f"p{percent}".removesuffix(".0"): value for percent, value in percentiles.items()}


def _num_received(record: RequestRecord, duration_s: float) -> int:
    num_counted = sum(event.num_tokens for event in record.events)
    if num_counted == 0:
        return 0
    num_within = sum(event.num_tokens for event in record.events if 0.0 <= event.at_s <= duration_s)
    return round((record.num_output_tokens or num_counted) * num_within / num_counted)


def _is_mismatched(record: RequestRecord) -> bool:
    return record.counts_are_exact and record.num_output_tokens != record.num_counted_tokens


def _cached_share(completed: Sequence[RequestRecord]) -> float | None:
    known = [
        (record.num_cached_tokens, record.num_prompt_tokens)
        for record in completed
        if record.num_cached_tokens is not None
    ]
    num_prompt_tokens = sum(num_prompt for _, num_prompt in known)
    return sum(num_cached for num_cached, _ in known) / num_prompt_tokens if num_prompt_tokens else None


def _per_second(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0


def _known(samples: Iterable[float | None]) -> list[float]:
    return [sample for sample in samples if sample is not None]
