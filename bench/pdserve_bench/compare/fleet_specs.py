"""Which fleets there are to compare: the command line, the ports and the cores of each. Starts nothing."""

import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_PORT_FLAGS = ("--http-port", "--grpc-port")


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """One fleet. `command`: the line that starts it, or "" where it runs already and `pid` is its topmost process.

    `http_url`: without /v1. `grpc_address`: host:port, ours only. `protocol`: what the load is sent over. `cores`: all
    that it is started on; empty: those of the benchmark.
    """

    name: str
    command: str
    http_url: str
    grpc_address: str = ""
    protocol: Literal["http", "grpc"] = "http"
    cores: tuple[int, ...] = ()
    pid: int = 0

    def __post_init__(self) -> None:
        if not self.command and not self.pid:
            raise ValueError(f"{self.name}: a fleet that runs already needs its pid, to be frozen in others' turns")
        if self.protocol == "grpc" and not self.grpc_address:
            raise ValueError(f"{self.name}: no gRPC address to send to")

    @property
    def identity(self) -> dict[str, object]:
        """What a measurement of it depends on: not on which free ports it was given, nor on its pid."""
        words = shlex.split(self.command)
        kept = [
            word
            for index, word in enumerate(words)
            if word not in _PORT_FLAGS and (index == 0 or words[index - 1] not in _PORT_FLAGS)
        ]
        found: dict[str, object] = {"command": kept, "protocol": self.protocol, "cores": list(self.cores)}
        return found if self.command else {**found, "http_url": self.http_url}


@dataclass(frozen=True, slots=True)
class Ports:
    http: int
    grpc: int


def free_ports() -> Ports:
    """Two that nobody listens on at the moment."""
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        return Ports(first.getsockname()[1], second.getsockname()[1])


def disaggregated(
    num_prefill: int,
    num_decode: int,
    *,
    cores: Sequence[int],
    num_blocks: int,
    ports: Ports | None = None,
    prefill_chunk: int = 512,
    extra: Sequence[str] = (),
) -> FleetSpec:
    """Ours with prefill and decode apart. Each worker gets an equal part of `cores`, and of `num_blocks` KV blocks.

    Prefix caching is off, as in peers: `extra`, further words of the command line, may say otherwise
    (`--set worker.prefix_cache=true`), and names the model (`--model DIR`).

    Args:
        num_blocks: of the whole fleet, so that fleets with as many hold as much KV.
        prefill_chunk: prompt tokens in a step.
        ports: by default free ones.
    """
    num_workers = num_prefill + num_decode
    _check(num_workers=min(num_prefill, num_decode), chunk=prefill_chunk, blocks_each=num_blocks // max(1, num_workers))
    mode = ["--mode", "disaggregated", "--prefill", str(num_prefill), "--decode", str(num_decode)]
    settings = {
        "worker.threads": max(1, len(cores) // num_workers),
        "worker.num_blocks": num_blocks // num_workers,
        "prefill.token_budget": prefill_chunk,
    }
    name = f"disaggregated {num_prefill}P:{num_decode}D, chunk {prefill_chunk}"
    return _ours(name, [*mode, *_set(settings), *extra], cores, ports)


def colocated(
    num_workers: int,
    num_threads: int,
    chunk: int,
    *,
    cores: Sequence[int],
    num_blocks: int,
    ports: Ports | None = None,
    extra: Sequence[str] = (),
) -> FleetSpec:
    """Ours with both phases in each worker, of `num_threads` threads; otherwise as `disaggregated`.

    Args:
        chunk: prompt tokens that ride along with a decode step.
    """
    _check(num_workers=num_workers, chunk=chunk, blocks_each=num_blocks // max(1, num_workers))
    settings = {
        "worker.threads": num_threads,
        "worker.num_blocks": num_blocks // num_workers,
        "colocated.token_budget": chunk,
    }
    name = f"colocated {num_workers}x{num_threads} threads, chunk {chunk}"
    mode = ["--mode", "colocated", "--colocated", str(num_workers)]
    return _ours(name, [*mode, *_set(settings), *extra], cores, ports)


def _check(num_workers: int, chunk: int, blocks_each: int) -> None:
    for what, number in (("workers", num_workers), ("chunk", chunk), ("KV blocks for each worker", blocks_each)):
        if number < 1:
            raise ValueError(f"{what}: {number}, must be at least 1")


def _set(settings: dict[str, int]) -> list[str]:
    pairs = ["worker.prefix_cache=false", *(f"{name}={value}" for name, value in settings.items())]
    return [word for pair in pairs for word in ("--set", pair)]


def _ours(name: str, words: Sequence[str], cores: Sequence[int], ports: Ports | None) -> FleetSpec:
    ports = ports or free_ports()
    own = ["--http-port", str(ports.http), "--grpc-port", str(ports.grpc)]
    return FleetSpec(
        name=name,
        command=shlex.join([sys.executable, "-m", "pdserve.cli", "serve", *words, *own]),
        http_url=f"http://127.0.0.1:{ports.http}",
        grpc_address=f"127.0.0.1:{ports.grpc}",
        protocol="grpc",
        cores=tuple(cores),
    )
