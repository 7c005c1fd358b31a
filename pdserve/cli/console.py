"""What every command says, and how it ends: results on stdout, notes and errors on stderr."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.serving.settings import ModelSettings, Settings
from pdserve.serving.settings_loader import checked, load_settings

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

DEFAULT_ADDRESS = "127.0.0.1:50051"
"""Of a coordinator's gRPC, where none is given."""

USAGE_ERROR = 2


def print_whole(table: Table) -> None:
    """A table that keeps every digit: lines wrap where the terminal is too narrow."""
    table.width = out.measure(table, options=out.options.update(max_width=sys.maxsize)).maximum
    out.print(table)


def print_error(message: str) -> None:
    """One line on stderr for each line of `message`."""
    for line in message.splitlines():
        err.print(Text.assemble(("error: ", "bold red"), line))


def fail(message: str, code: int = 1) -> NoReturn:
    print_error(message)
    raise typer.Exit(code)


def settings_from(
    flags: Mapping[str, object], assignments: Sequence[str], config: Path | None, sources: Sequence[str] = ()
) -> Settings:
    """Settings from flags, `--set` assignments (which yield to flags), environment and file; or exit code 2.

    `sources`: of every model, in place of those set elsewhere; the further ones are loaded as the first is.
    """
    given: dict[str, object] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            fail(f"--set {assignment}: expected section.field=value", USAGE_ERROR)
        given[name.strip()] = value
    given |= {name: value for name, value in flags.items() if value not in (None, [])}
    if sources:
        given |= {"model.source": sources[0], "more_models": ()}
    try:
        settings = load_settings(given, config, os.environ)
        return checked(settings.model_copy(update={"more_models": _more_models(settings, flags, sources[1:])}))
    except PdserveError as error:
        return fail(error.message, USAGE_ERROR)


def _more_models(settings: Settings, flags: Mapping[str, object], sources: Sequence[str]) -> tuple[ModelSettings, ...]:
    """Those of `sources` like the first model; those set elsewhere with what flags say of all."""
    first = settings.model
    named = tuple(first.model_copy(update={"source": source, "served_name": ""}) for source in sources)
    for_all = {field: getattr(first, field) for field in ("dtype", "device") if flags.get(f"model.{field}") is not None}
    return named or tuple(model.model_copy(update=for_all) for model in settings.more_models)


def explain(error: PdserveError) -> str:
    """A failure in one line for the terminal."""
    if error.reason in {ErrorReason.INVALID_ARGUMENT, ErrorReason.MODEL_NOT_FOUND}:
        return error.message
    hint = "" if error.retry_after_s is None else f" (retry after {error.retry_after_s:g} s)"
    return f"{error.reason.value}: {error.message}{hint}"
