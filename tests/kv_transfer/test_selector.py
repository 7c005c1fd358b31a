from dataclasses import replace

import pytest

from kv_transfer.local import LocalKvSender
from kv_transfer.selector import TransportSelector, build_senders
from pdserve.core.errors import ErrorReason, PdserveError
from tests.kv_transfer.support import EndLog, peer_at, plan_of


def local() -> LocalKvSender:
    return LocalKvSender(lambda commit: None)


def test_only_what_is_allowed_and_possible_is_made_best_first():
    made = {"local": local(), "grpc": local(), "shm": local()}
    makers = {name: (lambda sender=sender: sender) for name, sender in made.items()}
    senders = build_senders(("grpc", "nccl", "local"), makers)
    assert list(senders) == ["grpc", "local"]
    assert TransportSelector(senders).transports == ("grpc", "local")


def test_no_transport_at_all_is_refused_by_name():
    with pytest.raises(PdserveError, match="allowed transports: nccl; possible: grpc") as refused:
        build_senders(("nccl",), {"grpc": local})
    assert refused.value.reason is ErrorReason.UNSUPPORTED


def test_the_plan_names_the_transport():
    first, second, ends = local(), local(), EndLog()
    selector = TransportSelector({"grpc": first, "local": second})
    plan = plan_of(1, replace(peer_at(""), transport="local"), 0)
    transfer = selector.open(plan, ends)
    assert (first.num_open, second.num_open) == (0, 1)
    transfer.commit([1])
    assert ends.wait(1).error is None
    with pytest.raises(PdserveError, match="'nccl' is not one of: grpc, local"):
        selector.open(replace(plan, peer=replace(plan.peer, transport="nccl")), ends)
    selector.close()
    with pytest.raises(PdserveError):
        selector.open(plan, ends)
