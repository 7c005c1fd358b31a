"""docs/settings.md, written from the settings themselves."""

import sys
from collections.abc import Iterable, Iterator
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pdserve.serving.settings import Section, Settings

HEADER = """\
# Settings

Written from `pdserve/serving/settings.py` by `make settings-docs`.

A value comes from, first found: a flag (`--http-port 8001`, or `--set SECTION.FIELD=VALUE` for any), the environment
(`PDSERVE_COORDINATOR__HTTP_PORT=8001`), a TOML file (`--config FILE`, one table for each section), the default here.
An unknown name or an impossible value is refused by name.
"""


def settings_markdown() -> str:
    """The whole page."""
    top = [(name, field) for name, field in Settings.model_fields.items() if _section(field) is None]
    lines = [HEADER, "## Top level\n", *_table(top)]
    for name, field in Settings.model_fields.items():
        if (section := _section(field)) is not None:
            lines += [f"\n## `[{name}]`\n", *_table(section.model_fields.items())]
    return "\n".join(lines) + "\n"


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _table(fields: Iterable[tuple[str, FieldInfo]]) -> Iterator[str]:
    yield "| setting | default | meaning |"
    yield "|---|---|---|"
    for name, field in fields:
        yield f"| `{name}` | `{_default(field)}` | {_meaning(field)} |"


def _default(field: FieldInfo) -> str:
    return repr(field.default) if isinstance(field.default, str) else str(field.default)


def _meaning(field: FieldInfo) -> str:
    choices = get_args(field.annotation)
    text = " ".join((field.description or "").split())
    if choices and all(isinstance(choice, str) for choice in choices):
        text = f"{', '.join(choices)}. {text}"
    return text.strip()


if __name__ == "__main__":
    sys.stdout.write(settings_markdown())
