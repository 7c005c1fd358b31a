from dataclasses import replace

import pytest

from kv_transfer.local import LocalKvSender
from kv_transfer.selector import TransportSelector
from pdserve.core.errors import ErrorReason, PdserveError
from tests.kv_transfer.support import EndLog, peer_at, plan_of


def local() -> LocalKvSender:
    return LocalKvSender(lambda commit: None)


def test_only_what_is_allowed_and_possible_is_had_best_first():
    selector = TransportSelector(("grpc", "nccl", "local"), {"local": local(), "grpc": local(), "shm": local()})
    assert selector.transports == ("grpc", "local")


def test_no_transport_at_all_is_refused_by_name():
    sender = local()
    with pytest.raises(PdserveError, match="allowed transports: nccl; possible: grpc") as refused:
        TransportSelector(("nccl",), {"grpc": sender})
    assert refused.value.reason is ErrorReason.UNSUPPORTED
    with pytest.raises(PdserveError):  # closed
        sender.open(plan_of(1, peer_at(""), 0), EndLog())


def test_the_plan_names_the_transport():
    first, second, ends = local(), local(), EndLog()
    selector = TransportSelector(("grpc", "local"), {"grpc": first, "local": second})
    plan = plan_of(1, peer_at("", transport="local"), 0)
    transfer = selector.open(plan, ends)
    assert (first.num_open, second.num_open) == (0, 1)
    transfer.commit([1])
    assert ends.wait(1).error is None
    with pytest.raises(PdserveError, match="'nccl' is not one of: grpc, local"):
        selector.open(replace(plan, peer=replace(plan.peer, transport="nccl")), ends)
    selector.close()
    with pytest.raises(PdserveError):
        selector.open(plan, ends)


def test_one_sender_may_serve_several_transports():
    sender = local()
    selector = TransportSelector(("shm", "grpc"), dict.fromkeys(("shm", "grpc"), sender))
    for sequence, transport in enumerate(("shm", "grpc"), 1):
        selector.open(plan_of(sequence, peer_at("", transport=transport), 0), EndLog())
    assert sender.num_open == 2
    selector.close()
    assert sender.num_open == 0
