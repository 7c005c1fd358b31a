"""The one place where gRPC channels and servers get their options: keepalive, message limits, credentials."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import grpc.aio

MAX_MESSAGE_BYTES = 16 * 1024 * 1024

Options = list[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Shared by every channel and server of the project, so that no server calls its client's pings abuse.

    A frozen peer is noticed after about `interval_ms + timeout_ms`. Without `grpc.http2.ping_timeout_ms` that took a
    minute whatever the other options said. A server only needs to tolerate pings as frequent as a client's.
    """

    interval_ms: int = 5_000
    timeout_ms: int = 5_000
    server_min_interval_ms: int = 1_000


KEEPALIVE = Keepalive()


def _common_options(keepalive: Keepalive, max_message_bytes: int) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", keepalive.interval_ms),
        ("grpc.keepalive_timeout_ms", keepalive.timeout_ms),
        ("grpc.http2.ping_timeout_ms", keepalive.timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options(keepalive: Keepalive = KEEPALIVE, max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Own connection per channel (no global sharing), quick reconnects."""
    return [
        *_common_options(keepalive, max_message_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_retries", 0),
    ]


def server_options(keepalive: Keepalive = KEEPALIVE, max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Two servers never share a port; client pings are welcome at `server_min_interval_ms`."""
    return [
        *_common_options(keepalive, max_message_bytes),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", keepalive.server_min_interval_ms),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]


def aio_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, keepalive: Keepalive = KEEPALIVE
) -> grpc.aio.Channel:
    """A channel for asyncio code to host:port."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=channel_options(keepalive))
    return grpc.aio.secure_channel(address, credentials, options=channel_options(keepalive))


def sync_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, keepalive: Keepalive = KEEPALIVE
) -> grpc.Channel:
    """A channel for threads to host:port."""
    if credentials is None:
        return grpc.insecure_channel(address, options=channel_options(keepalive))
    return grpc.secure_channel(address, credentials, options=channel_options(keepalive))


def aio_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (), keepalive: Keepalive = KEEPALIVE
) -> grpc.aio.Server:
    return grpc.aio.server(options=server_options(keepalive), interceptors=interceptors)


def sync_server(threads: int | ThreadPoolExecutor, keepalive: Keepalive = KEEPALIVE) -> grpc.Server:
    """`threads`: how many, or a pool that the caller shuts down after the server (which leaves its threads behind)."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="grpc-server") if isinstance(threads, int) else threads
    return grpc.server(pool, options=server_options(keepalive))


def bind(add_port: Callable[[str], int], host: str, port: int) -> int:
    """Bind `add_port` (a server's add_insecure_port) to host:port and return the port in use.

    Raises:
        OSError: the port is taken or the host is not ours.
    """
    try:
        bound = add_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error
    if bound == 0:
        raise OSError(f"cannot listen on {host}:{port}")
    return bound
