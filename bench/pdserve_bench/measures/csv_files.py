"""A run's requests as a CSV file, one row each. Draws no figures together."""

import csv
from collections.abc import Callable, Mapping
from pathlib import Path

from pdserve_bench.load.records import RequestRecord, RunResult, ServerTimings
from pdserve_bench.measures.summarise import itl_p99_s

_CLIENT: Mapping[str, Callable[[RequestRecord], object]] = {
    "number": lambda record: record.number,
    "request_class": lambda record: record.request_class,
    "tenant": lambda record: record.tenant,
    "outcome": lambda record: record.outcome.value,
    "finish_reason": lambda record: record.finish_reason,
    "scheduled_s": lambda record: record.scheduled_s,
    "sent_s": lambda record: record.sent_s,
    "ended_s": lambda record: record.ended_s,
    "ttft_s": lambda record: record.ttft_s,
    "ttft_from_send_s": lambda record: record.ttft_from_send_s,
    "e2e_s": lambda record: record.e2e_s,
    "tpot_s": lambda record: record.tpot_s,
    "itl_p99_s": itl_p99_s,
    "itl_max_s": lambda record: max(record.itls_s, default=None),
    "num_prompt_tokens": lambda record: record.num_prompt_tokens,
    "num_cached_tokens": lambda record: record.num_cached_tokens,
    "max_tokens": lambda record: record.max_tokens,
    "num_output_tokens": lambda record: record.num_output_tokens,
    "num_counted_tokens": lambda record: record.num_counted_tokens,
    "counts_are_exact": lambda record: record.counts_are_exact,
    "num_events": lambda record: len(record.events),
    "error": lambda record: record.error,
}
_SERVER = tuple(ServerTimings.__dataclass_fields__)

COLUMNS = (*_CLIENT, *(f"server_{name}" for name in _SERVER))
"""Times in seconds from the run's begin; latencies from the scheduled time, but for `ttft_from_send_s`."""


def write_requests_csv(path: Path, run: RunResult) -> None:
    """By `COLUMNS`, in UTF-8. A figure that a request does not have is an empty field."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(_row(record) for record in run.records)


def _row(record: RequestRecord) -> list[object]:
    client = [figure(record) for figure in _CLIENT.values()]
    server = [None if record.server is None else getattr(record.server, name) for name in _SERVER]
    return client + server
