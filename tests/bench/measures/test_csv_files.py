"""The CSV file: one row a request, empty where there is no figure."""

import csv
from pathlib import Path

from pdserve_bench.load.records import Outcome, RequestRecord, ServerTimings
from pdserve_bench.measures.csv_files import COLUMNS, write_requests_csv
from tests.bench.measures.making import record, run_of


def _rows(path: Path, records: list[RequestRecord]) -> list[dict[str, str]]:
    write_requests_csv(path, run_of(records))
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_has_what_client_and_server_measured(tmp_path: Path) -> None:
    timings = ServerTimings(
        queue_s=0.1, reserve_s=0.2, prefill_s=0.3, exposed_transfer_s=0.4, decode_s=0.5, ttft_s=0.6,
        prefill_worker="p0", decode_worker="d0",
    )  # fmt: skip
    done = record(7, scheduled_s=1.0, sent_s=1.25, ended_s=3.5, events=[(2.0, 1), (3.0, 2)], server=timings)
    (row,) = _rows(tmp_path / "requests.csv", [done])
    expected = {
        "number": "7", "outcome": "completed", "scheduled_s": "1.0", "sent_s": "1.25", "ended_s": "3.5",
        "ttft_s": "1.0", "ttft_from_send_s": "0.75", "e2e_s": "2.0", "tpot_s": "0.5", "itl_p99_s": "0.99",
        "itl_max_s": "1.0", "num_prompt_tokens": "100", "num_output_tokens": "3", "num_events": "2",
        "server_queue_s": "0.1", "server_reserve_s": "0.2", "server_prefill_s": "0.3",
        "server_exposed_transfer_s": "0.4", "server_decode_s": "0.5", "server_ttft_s": "0.6",
        "server_prefill_worker": "p0", "server_decode_worker": "d0",
    }  # fmt: skip
    assert {key: row[key] for key in expected} == expected
    assert tuple(row) == COLUMNS


def test_what_was_never_sent_leaves_fields_empty(tmp_path: Path) -> None:
    failed = record(0, Outcome.FAILED, error='a "quote", a comma\nand a second line – ünïcode')
    unsent = record(1, Outcome.UNFINISHED, sent_s=None)
    rows = _rows(tmp_path / "requests.csv", [failed, unsent])
    assert [row["outcome"] for row in rows] == ["failed", "unfinished"]
    assert rows[0]["error"] == failed.error
    names = ("sent_s", "ttft_s", "tpot_s", "itl_p99_s", "itl_max_s", "num_cached_tokens", "server_queue_s")
    assert {rows[1][name] for name in names} == {""}


def test_every_scalar_of_a_record_has_a_column() -> None:
    scalars = set(RequestRecord.__dataclass_fields__) - {"events", "server", "output"}
    assert scalars <= set(COLUMNS)
