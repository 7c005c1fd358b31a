from dataclasses import fields, replace

import pytest

from kv_transfer.handshake import Terms, check_receiver, check_terms
from kv_transfer.messages import WorkerIdentity
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_info import KvLayout
from tests.kv_transfer.support import LAYOUT, RECEIVER

TERMS = Terms(protocol_version=5, model_fingerprint="a", kv_layout=LAYOUT, transport="grpc")


def refusal_of(offered: Terms) -> PdserveError:
    with pytest.raises(PdserveError) as refused:
        check_terms(offered, TERMS)
    assert refused.value.reason is ErrorReason.INCOMPATIBLE_PEER
    return refused.value


def test_equal_terms_are_accepted():
    check_terms(TERMS, TERMS)


@pytest.mark.parametrize("version", [4, 5, 6])
def test_neighbouring_protocol_versions_interoperate(version: int):
    check_terms(replace(TERMS, protocol_version=version), TERMS)


@pytest.mark.parametrize("version", [0, 3, 7])
def test_distant_protocol_versions_are_refused(version: int):
    assert f"protocol_version ({version}, 5)" in str(refusal_of(replace(TERMS, protocol_version=version)))


@pytest.mark.parametrize("name", [f.name for f in fields(KvLayout)])
def test_every_field_of_the_layout_counts_and_is_named(name: str):
    value = getattr(LAYOUT, name)
    other = value + "x" if isinstance(value, str) else value + 1
    layout = replace(LAYOUT, **{name: other})
    assert f"kv_layout.{name} ({other}, {value})" in str(refusal_of(replace(TERMS, kv_layout=layout)))


def test_another_model_or_transport_is_refused():
    message = str(refusal_of(replace(TERMS, model_fingerprint="b", transport="shm")))
    assert "model_fingerprint (b, a)" in message
    assert "transport (shm, grpc)" in message


@pytest.mark.parametrize("addressed", [WorkerIdentity("decode-9", 22), WorkerIdentity("decode-0", 21)])
def test_another_worker_or_run_at_the_address_is_refused(addressed: WorkerIdentity):
    check_receiver(RECEIVER, RECEIVER)
    with pytest.raises(PdserveError) as refused:
        check_receiver(addressed, RECEIVER)
    assert refused.value.reason is ErrorReason.STALE
