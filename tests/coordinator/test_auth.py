import pytest

from coordinator.auth import Caller, authenticator_for
from pdserve.core.errors import ErrorReason, PdserveError

KEYS = {"secret-1": "acme", "schlüssel": "zeta"}


def test_without_keys_everybody_is_the_default_tenant() -> None:
    assert authenticator_for({}).authenticate(None) == Caller("default")
    assert authenticator_for({}).authenticate("Bearer whatever") == Caller("default")


@pytest.mark.parametrize(("header", "tenant"), [("Bearer secret-1", "acme"), ("bearer  schlüssel ", "zeta")])
def test_a_known_key_names_its_tenant(header: str, tenant: str) -> None:
    assert authenticator_for(KEYS).authenticate(header) == Caller(tenant)


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic secret-1", "Bearer secret-2", "Bearer \ud800"]
)
def test_anything_else_is_refused_without_telling_the_key(header: str | None) -> None:
    with pytest.raises(PdserveError) as caught:
        authenticator_for(KEYS).authenticate(header)
    assert caught.value.reason is ErrorReason.UNAUTHENTICATED
    assert "secret" not in caught.value.message
