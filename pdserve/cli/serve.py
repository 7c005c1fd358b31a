"""`pdserve serve | coordinator | worker`: settings from flags, then a local fleet or one service in this process."""

import logging
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from pdserve.cli import console
from pdserve.core.errors import PdserveError
from pdserve.launch.plan import ChildPlan
from pdserve.serving.logs import configure_logging
from pdserve.serving.settings import Settings

MODEL_HELP = "Built-in name, hub's ORG/NAME, model directory or .gguf file"
ModelOption = Annotated[str | None, typer.Option("--model", help=f"{MODEL_HELP}.")]
ModelsOption = Annotated[
    list[str] | None, typer.Option("--model", help=f"{MODEL_HELP}; repeat it to serve several models.")
]
DtypeOption = Annotated[str | None, typer.Option("--dtype", help="bfloat16 or float32, of weights and KV.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:N.")]
HostOption = Annotated[str | None, typer.Option("--host", help="Address to listen on.")]
HttpPortOption = Annotated[int | None, typer.Option("--http-port", help="OpenAI API; 0 picks a free port.")]
GrpcPortOption = Annotated[int | None, typer.Option("--grpc-port", help="gRPC API; 0 picks a free port.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file with one table for each section.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Any other setting; repeatable.")
]


class WorkerRole(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


def serve(  # noqa: PLR0913 - one parameter is one flag
    *,
    mode: Annotated[Literal["disaggregated", "colocated"] | None, typer.Option(help="Topology.")] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers of each model.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers of each model.")] = None,
    colocated: Annotated[int | None, typer.Option(help="Colocated workers of each model.")] = None,
    models: ModelsOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    host: HostOption = None,
    http_port: HttpPortOption = None,
    grpc_port: GrpcPortOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Serve one or more models from this machine: a coordinator and its workers, until Ctrl-C."""
    flags = {
        "launch.mode": mode,
        "launch.prefill": prefill,
        "launch.decode": decode,
        "launch.colocated": colocated,
        "model.dtype": dtype,
        "model.device": device,
        "coordinator.host": host,
        "coordinator.http_port": http_port,
        "coordinator.grpc_port": grpc_port,
    }
    settings = console.settings_from(flags, assignments or (), config, models or ())
    idle = ("prefill", "decode") if settings.launch.mode == "colocated" else ("colocated",)
    useless = [f"--{role} has no effect in {settings.launch.mode} mode" for role in idle if flags[f"launch.{role}"]]
    if useless:
        console.fail("\n".join(useless), console.USAGE_ERROR)
    raise typer.Exit(_serve_fleet(settings))


def coordinator(  # noqa: PLR0917 - one parameter is one flag
    host: HostOption = None,
    http_port: HttpPortOption = None,
    grpc_port: GrpcPortOption = None,
    models: ModelsOption = None,
    dtype: DtypeOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Run a coordinator alone; workers with one of its models and the same dtype join it from anywhere."""
    flags = {
        "coordinator.host": host,
        "coordinator.http_port": http_port,
        "coordinator.grpc_port": grpc_port,
        "model.dtype": dtype,
    }
    _run_here("coordinator", console.settings_from(flags, assignments or (), config, models or ()))


def worker(  # noqa: PLR0913 - one parameter is one flag
    role: Annotated[WorkerRole, typer.Argument(help="What it does.")],
    *,
    coordinators: Annotated[
        list[str] | None, typer.Option("--coordinator", metavar="HOST:PORT", help="Whom to join; repeatable.")
    ] = None,
    worker_id: Annotated[str | None, typer.Option("--id", help="Its name in the fleet.")] = None,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    host: HostOption = None,
    advertise_host: Annotated[str | None, typer.Option(help="Address that other machines reach.")] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Run one worker and join a fleet."""
    flags = {
        "worker.coordinators": coordinators,
        "worker.worker_id": worker_id,
        "worker.host": host,
        "worker.advertise_host": advertise_host,
        "model.source": model,
        "model.dtype": dtype,
        "model.device": device,
        "more_models": (),
    }
    settings = console.settings_from(flags, assignments or (), config)
    if not settings.worker.coordinators:
        console.fail("worker.coordinators is empty: name one with --coordinator HOST:PORT", console.USAGE_ERROR)
    _run_here(role.value, settings)


def _serve_fleet(settings: Settings) -> int:
    from pdserve.core.model_fetch import resolve_model
    from pdserve.launch.local import LocalFleet, RunningFleet
    from pdserve.launch.machine import this_machine

    def show(fleet: RunningFleet) -> None:
        console.out.print(summary(settings, fleet.host, fleet.http_port, fleet.grpc_port))
        console.out.print(workers_table(fleet.workers))
        console.out.print("\nTry:\n" + example(settings, fleet.host, fleet.http_port) + "\n\nCtrl-C stops the fleet.")

    configure_logging(settings.log_level, "launcher")
    try:
        fleet = LocalFleet(settings, this_machine(), show)
    except PdserveError as error:
        console.fail(error.message, console.USAGE_ERROR)
    for model in settings.models:
        resolve_model(model.source, settings.cache_dir)
    count = settings.launch.colocated if settings.launch.mode == "colocated" else 0
    workers = f"{count} colocated" if count else f"{settings.launch.prefill} prefill, {settings.launch.decode} decode"
    each = "each of " if len(settings.models) > 1 else ""
    names = ", ".join(model.name for model in settings.models)
    console.err.print(f"Starting a coordinator and {workers} workers for {each}{names} …")
    return fleet.run()


def _run_here(role: str, settings: Settings) -> None:
    from pdserve.launch.roles import run_service

    def ready(info: dict[str, object]) -> None:
        details = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in info.items())
        logging.getLogger(__name__).info("ready: %s", details)

    configure_logging(settings.log_level, role, settings.worker.worker_id)
    try:
        code = run_service(role, settings, ready)
    except OSError as error:
        console.fail(str(error))
    raise typer.Exit(code)


def summary(settings: Settings, host: str, http_port: int, grpc_port: int) -> Table:
    table = Table(title="pdserve is ready", title_justify="left", show_header=False, box=None, title_style="bold green")
    for model in settings.models:
        table.add_row("model", f"{model.name} ({model.dtype}, {model.device})")
    table.add_row("OpenAI API", f"http://{host}:{http_port}/v1")
    table.add_row("metrics", f"http://{host}:{http_port}/metrics")
    table.add_row("gRPC", f"{host}:{grpc_port}")
    return table


def workers_table(workers: Iterable[tuple[ChildPlan, object]]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 2))
    for plan, _ in workers:
        cores = ", ".join(map(str, plan.settings.worker.cores)) or "any"
        table.add_row(plan.name, f"cores {cores}")
    return table


def example(settings: Settings, host: str, http_port: int) -> str:
    """A request that every model takes: one without a chat template, too."""
    body = f'{{"model": "{settings.model.name}", "prompt": "Once upon a time", "max_tokens": 64, "stream": true}}'
    key = ' -H "Authorization: Bearer $KEY"' if settings.coordinator.api_keys else ""
    url = f"http://{host}:{http_port}/v1/completions"
    return f"  curl -N {url} -H 'Content-Type: application/json'{key} \\\n  -d '{body}'"
