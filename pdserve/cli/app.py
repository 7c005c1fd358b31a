"""The tree of commands, and where a typed failure becomes one line and an exit code."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli import console
from pdserve.cli.bench import bench_app
from pdserve.cli.generate import generate
from pdserve.cli.serve import coordinator, serve, worker
from pdserve.cli.status import status
from pdserve.core.errors import PdserveError

app = typer.Typer(
    name="pdserve",
    help="LLM serving with prefill and decode apart.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Model files.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(bench_app, name="bench")

app.command()(serve)
app.command()(coordinator)
app.command()(worker)
app.command()(status)
app.command()(generate)


@model_app.command("fetch")
def fetch(
    name: Annotated[
        str, typer.Argument(help="Built-in model, or ORG/NAME, ORG/NAME@REVISION or ORG/NAME/FILE.gguf on the hub.")
    ] = "smollm2-135m-instruct",
    config: Annotated[Path | None, typer.Option(help="TOML settings file.")] = None,
) -> None:
    """Download a model into the cache, or verify or renew the copy there; prints its path."""
    from pdserve.core.model_fetch import resolve_model

    settings = console.settings_from({}, (), config)
    typer.echo(resolve_model(name, settings.cache_dir, refresh=True))


def run() -> None:
    """Entry point: exit code 1 for a failure, 2 for wrong usage, 130 after Ctrl-C."""
    try:
        app()
    except PdserveError as error:
        console.print_error(console.explain(error))
        sys.exit(1)
