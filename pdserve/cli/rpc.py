"""Calls from the terminal to a coordinator, with failures explained for a person."""

from collections.abc import Generator
from contextlib import contextmanager

import grpc

from pdserve.cli import console
from pdserve.client.channels import sync_channel
from pdserve.client.errors import ERROR_METADATA_KEY, error_from_rpc
from pdserve.core.errors import PdserveError


@contextmanager
def connected(address: str) -> Generator[grpc.Channel]:
    """A channel to a coordinator, under `explained`."""
    with explained(address), sync_channel(address) as channel:
        yield channel


@contextmanager
def explained(address: str) -> Generator[None]:
    """Where nobody answers a call inside the block, that is said and the command ends.

    Raises:
        PdserveError: what the coordinator answered instead.
    """
    try:
        yield
    except grpc.RpcError as error:
        _fail_without_answer(address, error)
        raise error_from_rpc(error) from None
    except PdserveError as error:
        if isinstance(error.__cause__, grpc.RpcError):
            _fail_without_answer(address, error.__cause__)
        raise


def _fail_without_answer(address: str, error: grpc.RpcError) -> None:
    typed = any(key == ERROR_METADATA_KEY for key, _ in getattr(error, "trailing_metadata", lambda: None)() or ())
    code = getattr(error, "code", lambda: None)()
    if not typed and code is grpc.StatusCode.UNAVAILABLE:
        console.fail(
            f"cannot reach {address}: is `pdserve serve` running there? --address takes HOST:PORT of its gRPC, "
            "not the HTTP port or a URL"
        )
    if not typed and code is grpc.StatusCode.DEADLINE_EXCEEDED:
        console.fail(f"no answer from {address} in time")
