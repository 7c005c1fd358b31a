"""E02: every order of abort, end of sending, end of receiving and a duplicate of each, beside a stream that goes on."""

import itertools
from collections.abc import Callable, Iterator

import pytest

from kv_transfer.interfaces import OutboundEnd
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.engine.events import SequenceReleased
from tests.decode_service.test_stage import Bench as DecodeBench
from tests.prefill_service.test_stage import Bench as PrefillBench
from tests.support.fake_engine import expected_output, make_sequence


def orders(*events: str) -> Iterator[tuple[str, ...]]:
    """All distinct orders of the events, each twice."""
    return iter(sorted(set(itertools.permutations(events * 2))))


ABORT_AND_SENT = list(orders("abort", "sent", "aborted"))
ABORT_AND_RECEIVED = list(orders("abort", "received", "submit"))


def test_all_orders_are_there() -> None:
    assert len(ABORT_AND_SENT) == len(ABORT_AND_RECEIVED) == 90


@pytest.mark.parametrize("num_steps", [0, 1, 3], ids=["queued", "computing", "sending"])
def test_a_prefill_stage_survives_every_order(num_steps: int) -> None:
    for order in ABORT_AND_SENT:
        check_prefill(order, num_steps)


def check_prefill(order: tuple[str, ...], num_steps: int) -> None:
    bench = PrefillBench(budget=8)
    sequence, bystander = make_sequence(1, 20), make_sequence(2, 30)
    bench.submit(sequence)
    for _ in range(num_steps):
        bench.step()
    bench.submit(bystander)
    opened = sequence.id in bench.transfers
    cancelled = PdserveError(ErrorReason.CANCELLED, "")
    handlers: dict[str, Callable[[], object]] = {
        "abort": lambda: bench.stage.cancel(sequence.id),
        "sent": lambda: bench.stage.transfer_ended(OutboundEnd(sequence.id, None, 10, 0.1)),
        "aborted": lambda: bench.stage.transfer_ended(OutboundEnd(sequence.id, cancelled, 0, 0.0)),
    }
    released = 0
    for event in order:
        if opened or event == "abort":
            handlers[event]()
        released += sum(isinstance(e, SequenceReleased) for e in bench.stage.take_events())
    assert released == 1, order
    assert bench.stage.totals.num_stale >= 1
    expected = expected_output(bystander.token_ids, 1)
    while bench.stage.has_work:
        bench.step()
    assert bystander.token_ids[30:] == expected
    bench.end(bystander)
    bench.assert_empty()


@pytest.mark.parametrize("num_steps", [0, 2], ids=["at once", "while decoding"])
def test_a_decode_stage_survives_every_order(num_steps: int) -> None:
    for order in ABORT_AND_RECEIVED:
        check_decode(order, num_steps)


def check_decode(order: tuple[str, ...], num_steps: int) -> None:
    bench = DecodeBench()
    job, bystander = bench.job(1, [1, 2, 3, 4, 5]), bench.job(2, [7, 8, 9])
    bench.stage.submit(bystander)
    bench.deliver(bystander)

    def receive() -> None:
        before = bench.pool.num_free_blocks
        blocks: list[int] = []
        allocate = bench.stage.allocate_inbound
        bench.stage.allocate_inbound = lambda s, n: blocks.extend(found := allocate(s, n)) or found  # type: ignore[method-assign]
        try:
            bench.deliver(job)
        except PdserveError as error:
            assert error.reason is ErrorReason.STALE
            bench.stage.release_inbound(job.sequence_id, blocks)
            assert bench.pool.num_free_blocks == before
        finally:
            bench.stage.allocate_inbound = allocate  # type: ignore[method-assign]

    handlers: dict[str, Callable[[], object]] = {
        "abort": lambda: bench.stage.cancel(job.sequence_id),
        "received": receive,
        "submit": lambda: bench.stage.submit(job),
    }
    for event in order:
        handlers[event]()
        for _ in range(num_steps):
            bench.step()
    bench.stage.cancel(job.sequence_id)
    bench.run_until_idle()
    assert bench.outputs[bystander.sequence_id] == expected_output(bystander.token_ids, 8)[1:], order
    assert bench.stage.totals.num_stale >= 1
    bench.assert_empty()
