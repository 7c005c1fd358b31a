"""Status tables of several models."""

import pytest

from pdserve.cli import console
from pdserve.cli.status import tables
from pdserve.v1 import fleet_pb2 as pb

EVALUATION_ID = "bf16/cpu-1/dot/fp32-attention/0123456789abcdef"
MODELS = ("gemma3-270m", "a-model-with-a-very-long-name-indeed")


def _worker(name: str) -> pb.WorkerStatus:
    sent = pb.TransportTotals(transport="shm", num_completed=3, num_failed=1, num_bytes=987_654_000_000, seconds=0.6)
    totals = pb.WorkerTotals(transports=[sent])
    load = pb.LoadReport(num_usable_blocks=7654321, queued_prefill_tokens=1234567, totals=totals)
    return pb.WorkerStatus(
        worker=pb.WorkerId(worker_id=name),
        state="ready",
        control_address="127.0.0.1:50051",
        load=load,
        evaluation_id=EVALUATION_ID,
    )


def _fleet() -> pb.FleetStatus:
    """The second model has no prefill worker."""
    pools = [
        pb.PoolStatus(model_name=MODELS[0], role=pb.ROLE_PREFILL, workers=[_worker(f"{MODELS[0]}.prefill-0")]),
        pb.PoolStatus(model_name=MODELS[0], role=pb.ROLE_DECODE, workers=[_worker(f"{MODELS[0]}.decode-0")]),
        pb.PoolStatus(model_name=MODELS[1], role=pb.ROLE_PREFILL),
        pb.PoolStatus(model_name=MODELS[1], role=pb.ROLE_DECODE, workers=[_worker(f"{MODELS[1]}.decode-0")]),
    ]
    return pb.FleetStatus(pools=pools, queues=[pb.QueueStatus(model_name=name) for name in MODELS])


def test_each_model_has_a_table_of_its_own_pools() -> None:
    titles = [str(table.title) for table in tables(_fleet())]
    assert [title for title in titles if title.startswith("Pools")] == [f"Pools of {name}" for name in MODELS]
    lacking = list(tables(_fleet()))[1]
    assert [next(iter(column.cells)) for column in lacking.columns[:2]] == ["prefill", "none"]


def test_what_was_sent_is_shown_by_transport() -> None:
    (table,) = (table for table in tables(_fleet()) if table.title == "KV sent")
    row = [next(iter(column.cells)) for column in table.columns[1:]]
    assert row == ["shm", "3", "1", "987,654", "150"]


def test_no_digit_is_cut_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for table in tables(_fleet()):
        console.print_whole(table)
    out = capsys.readouterr().out
    assert "…" not in out
    for text in ("1,234,567", "7,654,321", f"{MODELS[1]}.decode-0"):
        assert text in out
