"""What every command says, and how it ends: results on stdout, notes and errors on stderr."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.serving.settings import Settings
from pdserve.serving.settings_loader import load_settings

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

DEFAULT_ADDRESS = "127.0.0.1:50051"
"""Of a coordinator's gRPC, where none is given."""

USAGE_ERROR = 2


def print_error(message: str) -> None:
    """One line on stderr for each line of `message`."""
    for line in message.splitlines():
        err.print(Text.assemble(("error: ", "bold red"), line))


def fail(message: str, code: int = 1) -> NoReturn:
    print_error(message)
    raise typer.Exit(code)


def settings_from(flags: Mapping[str, object], assignments: Sequence[str], config: Path | None) -> Settings:
    """Settings from flags, `--set` assignments (which yield to flags), environment and file; or exit code 2."""
    given: dict[str, object] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            fail(f"--set {assignment}: expected section.field=value", USAGE_ERROR)
        given[name.strip()] = value
    given |= {name: value for name, value in flags.items() if value not in (None, [])}
    try:
        return load_settings(given, config, os.environ)
    except PdserveError as error:
        return fail(error.message, USAGE_ERROR)


def explain(error: PdserveError) -> str:
    """A failure in one line for the terminal."""
    if error.reason in {ErrorReason.INVALID_ARGUMENT, ErrorReason.MODEL_NOT_FOUND}:
        return error.message
    hint = "" if error.retry_after_s is None else f" (retry after {error.retry_after_s:g} s)"
    return f"{error.reason.value}: {error.message}{hint}"
