"""`pdserve status`: what the coordinator knows of its fleet, as tables or as protobuf's JSON."""

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.table import Table

from pdserve.cli import console
from pdserve.v1 import fleet_pb2 as pb

TIMEOUT_S = 10.0


def status(
    address: Annotated[str, typer.Option(help="The coordinator's gRPC address.")] = console.DEFAULT_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Show pools, workers, reservations, queues and what each worker has done."""
    from pdserve.cli.rpc import connected
    from pdserve.v1 import fleet_pb2_grpc

    with connected(address) as channel:
        fleet = fleet_pb2_grpc.FleetStub(channel).GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT_S)
    if as_json:
        typer.echo(to_json(fleet))
        return
    for table in tables(fleet):
        console.print_whole(table)
    console.out.print(headline(fleet))


def to_json(fleet: pb.FleetStatus) -> str:
    """Every field, under its name in the .proto; 64-bit numbers are strings, as protobuf's JSON mapping has it."""
    from google.protobuf.json_format import MessageToJson

    return MessageToJson(fleet, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def headline(fleet: pb.FleetStatus) -> str:
    outcomes = ", ".join(f"{name} {count}" for name, count in sorted(fleet.requests_by_outcome.items())) or "none yet"
    state = ", draining" if fleet.draining else ""
    return f"up {fleet.uptime_s:.0f} s{state}; {fleet.num_in_flight} in flight; requests by outcome: {outcomes}"


def tables(fleet: pb.FleetStatus) -> Iterator[Table]:
    """Each fits 80 columns with worker names of up to some 22 characters."""
    for model in dict.fromkeys(pool.model_name for pool in fleet.pools):
        yield pools_table(fleet, model)
    yield addresses_table(fleet)
    yield evaluations_table(fleet)
    yield reservations_table(fleet)
    yield queues_table(fleet)
    yield work_table(fleet)
    yield transfers_table(fleet)
    yield failures_table(fleet)


def role_name(role: int) -> str:
    return pb.Role.Name(pb.Role.ValueType(role)).removeprefix("ROLE_").lower()


def pools_table(fleet: pb.FleetStatus, model: str) -> Table:
    """One row a worker and pool of the model: sequences in flight (as the coordinator counts), running and waiting
    there, and moving, whose KV is on its way; prompt tokens queued."""
    table = _table(f"Pools of {model}", ("role", "worker", "state"), ("in flight", "run", "wait", "move", "queued"))
    for pool in (pool for pool in fleet.pools if pool.model_name == model):
        if not pool.workers:
            table.add_row(role_name(pool.role), "none", style="red")
        for worker in pool.workers:
            load = worker.load
            numbers = (worker.num_in_flight, load.num_running, load.num_waiting, load.num_transferring)
            table.add_row(
                role_name(pool.role),
                worker.worker.worker_id,
                worker.state,
                *_numbers(*numbers, load.queued_prefill_tokens),
                style="" if worker.state == "ready" else "yellow",
            )
    return table


def addresses_table(fleet: pb.FleetStatus) -> Table:
    table = _table("Workers", ("worker", "model", "address"), ())
    workers = {w.worker.worker_id: (pool.model_name, w.control_address) for pool in fleet.pools for w in pool.workers}
    for name, (model, address) in sorted(workers.items()):
        table.add_row(name, model, address)
    return table


def evaluations_table(fleet: pb.FleetStatus) -> Table:
    """One row a worker: the evaluation id of its configuration, by which docs/quality.md tells what it scores."""
    table = _table("Evaluations", ("worker", "evaluation id"), ())
    found = {worker.worker.worker_id: worker.evaluation_id for pool in fleet.pools for worker in pool.workers}
    for name, evaluation_id in sorted(found.items()):
        table.add_row(name, evaluation_id or "unknown")
    return table


def reservations_table(fleet: pb.FleetStatus) -> Table:
    """One row a worker: KV blocks promised to sequences, kept for prefixes, free, and usable in all."""
    table = _table("Reservations (KV blocks)", ("worker",), ("reserved", "cached", "free", "usable"))
    for name, load in _loads(fleet):
        blocks = (load.num_reserved_blocks, load.num_cached_blocks, load.num_free_blocks, load.num_usable_blocks)
        table.add_row(name, *_numbers(*blocks))
    return table


def queues_table(fleet: pb.FleetStatus) -> Table:
    table = _table("Queues", ("model",), ("requests", "of", "tokens", "of"))
    for item in fleet.queues:
        table.add_row(
            item.model_name, *_numbers(item.num_requests, item.max_requests, item.num_tokens, item.max_tokens)
        )
    return table


def work_table(fleet: pb.FleetStatus) -> Table:
    """One row a worker, whatever its roles: what it has completed since it started."""
    names = ("prefills", "prompt tok", "decodes", "output tok", "transfers", "MB")
    table = _table("Done", ("worker",), names)
    for name, load in _loads(fleet):
        total = load.totals
        megabytes = total.transferred_bytes // 1_000_000
        prefill = (total.prefills_completed, total.prefill_tokens)
        decode = (total.decodes_completed, total.decode_tokens)
        table.add_row(name, *_numbers(*prefill, *decode, total.transfers_completed, megabytes))
    return table


def transfers_table(fleet: pb.FleetStatus) -> Table:
    """One row a worker and transport over which it sent KV: transfers, those that failed, bytes, and the mean time of
    one, from its begin to its end."""
    table = _table("KV sent", ("worker", "transport"), ("transfers", "failed", "MB", "ms each"))
    for name, load in _loads(fleet):
        for sent in load.totals.transports:
            num_ended = sent.num_completed + sent.num_failed
            each_ms = round(1000 * sent.seconds / num_ended) if num_ended else 0
            numbers = (sent.num_completed, sent.num_failed, sent.num_bytes // 1_000_000, each_ms)
            table.add_row(name, sent.transport, *_numbers(*numbers))
    return table


def failures_table(fleet: pb.FleetStatus) -> Table:
    table = _table("Not done", ("worker",), ("cancelled", "failed", "transfers failed", "preempted", "stale"))
    for name, load in _loads(fleet):
        total = load.totals
        ended = (total.cancelled, total.failed, total.transfers_failed, total.preemptions, total.stale_events)
        table.add_row(name, *_numbers(*ended))
    return table


def _loads(fleet: pb.FleetStatus) -> list[tuple[str, pb.LoadReport]]:
    """Each worker once, whatever its roles, by name."""
    return sorted(
        {worker.worker.worker_id: worker.load for pool in fleet.pools for worker in pool.workers}.items(),
        key=lambda item: item[0],
    )


def _table(title: str, labels: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim", padding=(0, 1))
    for label in labels:
        table.add_column(label, no_wrap=True)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _numbers(*values: int) -> tuple[str, ...]:
    return tuple(f"{value:,}" for value in values)
