"""Who is calling: an API key to a tenant. Knows nothing of what tenants may do."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pdserve.core.errors import ErrorReason, PdserveError

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str = DEFAULT_TENANT


class Authenticator(Protocol):
    def authenticate(self, authorization: str | None) -> Caller:
        """`authorization` is the HTTP header or gRPC metadata of that name: "Bearer KEY".

        Raises:
            PdserveError: UNAUTHENTICATED.
        """
        ...


class OneTenant:
    """No key is asked for; everybody is one tenant."""

    def authenticate(self, authorization: str | None) -> Caller:
        return Caller()


class ApiKeys:
    """A fixed set of keys. Comparison takes the same time whichever key is offered."""

    def __init__(self, tenant_by_key: Mapping[str, str]) -> None:
        self._tenants = [(key.encode(), tenant) for key, tenant in tenant_by_key.items()]

    def authenticate(self, authorization: str | None) -> Caller:
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise PdserveError(ErrorReason.UNAUTHENTICATED, "an API key is required: Authorization: Bearer KEY")
        offered = key.strip().encode(errors="replace")
        found = [tenant for known, tenant in self._tenants if hmac.compare_digest(known, offered)]
        if not found:
            raise PdserveError(ErrorReason.UNAUTHENTICATED, "the API key is not known")
        return Caller(found[0])


def authenticator_for(tenant_by_key: Mapping[str, str]) -> Authenticator:
    """By the `api_keys` setting: empty means that no key is asked for."""
    return ApiKeys(tenant_by_key) if tenant_by_key else OneTenant()
