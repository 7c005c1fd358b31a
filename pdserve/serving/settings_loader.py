"""Merges flags, environment, TOML and defaults into `Settings`, and refuses what is unknown or impossible by name.

Reads the given mapping and file only: no process-wide state.
"""

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_origin

from pydantic import BaseModel, ValidationError

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.serving.settings import Section, Settings
from pdserve.serving.settings_checks import contradictions

ENV_PREFIX = "PDSERVE_"
NOT_SETTINGS = frozenset({"PDSERVE_API_KEY"})
"""Variables that the client side reads."""

_SECRET = frozenset({"coordinator.api_keys"})


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as somebody gave it, and where."""

    value: object
    origin: str


def load_settings(flags: Mapping[str, object], config: Path | None, environ: Mapping[str, str]) -> Settings:
    """Settings by precedence: flags, environment, TOML file, defaults.

    Args:
        flags: "section.field" (or a top-level name) → value; None means not given. Strings are decoded as in the
            environment: lists are comma-separated or JSON, tables are JSON.
        config: a TOML file with one table a section.
        environ: only names that start with PDSERVE_ are looked at: PDSERVE_<SECTION>__<FIELD>.

    Raises:
        PdserveError: INVALID_ARGUMENT; the message has one line for each problem.
    """
    given = {**_from_toml(config), **_from_environment(environ), **_from_flags(flags)}
    unknown = [_unknown(name, item) for name, item in given.items() if name not in _FIELDS]
    if unknown:
        raise _refusal(unknown)
    try:
        settings = Settings.model_validate(_nested(given))
    except ValidationError as error:
        raise _refusal(_explain(error, given)) from None
    return checked(settings)


def checked(settings: Settings) -> Settings:
    """The same settings.

    Raises:
        PdserveError: INVALID_ARGUMENT, if they contradict each other; one line for each problem.
    """
    problems = contradictions(settings)
    if problems:
        raise _refusal(problems)
    return settings


def _fields() -> dict[str, str]:
    """Every setting's dotted name → "tuple", "dict" or something else."""
    named: dict[str, str] = {}
    for name, field in Settings.model_fields.items():
        section = _section(field.annotation)
        if section is None:
            named[name] = _container(field.annotation)
        else:
            named |= {f"{name}.{inner}": _container(item.annotation) for inner, item in section.model_fields.items()}
    return named


def _container(annotation: object) -> str:
    return getattr(get_origin(annotation), "__name__", "")


def _section(annotation: object) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


_FIELDS = _fields()


def _from_toml(config: Path | None) -> dict[str, _Given]:
    if config is None:
        return {}
    try:
        tables: dict[str, object] = tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refusal([f"config file {config}: {error.strerror}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _refusal([f"config file {config}: {error}"]) from None
    given: dict[str, _Given] = {}
    for name, value in tables.items():
        if isinstance(value, dict) and any(known.startswith(f"{name}.") for known in _FIELDS):
            table = cast(dict[str, object], value)
            given |= {f"{name}.{inner}": _Given(item, str(config)) for inner, item in table.items()}
        else:
            given[name] = _Given(tables[name], str(config))  # noqa: PLR1733 - `value` is half narrowed here
    return given


def _from_environment(environ: Mapping[str, str]) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for variable, text in sorted(environ.items()):
        if variable.startswith(ENV_PREFIX) and variable not in NOT_SETTINGS:
            name = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".", 1)
            given[name] = _Given(_decoded(name, text, variable), variable)
    return given


def _from_flags(flags: Mapping[str, object]) -> dict[str, _Given]:
    return {name: _Given(_decoded(name, value, "flag"), "flag") for name, value in flags.items() if value is not None}


def _decoded(name: str, value: object, origin: str) -> object:
    kind = _FIELDS.get(name)
    if not isinstance(value, str) or kind not in {"tuple", "dict"}:
        return value
    text = value.strip()
    if kind == "dict" or text.startswith("["):
        try:
            return json.loads(text or "{}")
        except json.JSONDecodeError as error:
            raise _refusal([f"{name} ({origin}): not valid JSON: {error.msg}"]) from None
    return tuple(part.strip() for part in text.split(",")) if text else ()


def _nested(given: Mapping[str, _Given]) -> dict[str, object]:
    flat = {name: item.value for name, item in given.items() if "." not in name}
    sections: dict[str, dict[str, object]] = {}
    for name, item in given.items():
        section, dot, field = name.partition(".")
        if dot:
            sections.setdefault(section, {})[field] = item.value
    return {**flat, **sections}


def _unknown(name: str, item: _Given) -> str:
    if name in Settings.model_fields and isinstance(item.value, list):
        further = "; further models are [[more_models]]" if name == "model" else ""
        return f"[[{name}]] ({item.origin}): there is one table of that name; write [{name}]{further}"
    near = difflib.get_close_matches(name, _FIELDS, n=1)
    return f"unknown setting {name} ({item.origin})" + (f": did you mean {near[0]}?" if near else "")


def _explain(error: ValidationError, given: Mapping[str, _Given]) -> list[str]:
    lines: list[str] = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        parts = [str(part) for part in problem["loc"]]
        name = ".".join(parts[:2]) if ".".join(parts[:2]) in _FIELDS else parts[0]
        origin = given[name].origin if name in given else "default"
        inner = [] if name in _SECRET else parts[name.count(".") + 1 :]
        where = f"{'.'.join(inner)}: " if inner else ""
        text = problem["msg"].replace("Input should", "should")
        lines.append(f"{_described(name, given)} ({origin}): {where}{text}")
    return list(dict.fromkeys(lines))


def _described(name: str, given: Mapping[str, _Given]) -> str:
    return name if name in _SECRET or name not in given else f"{name} = {given[name].value!r}"


def _refusal(problems: list[str]) -> PdserveError:
    return PdserveError(ErrorReason.INVALID_ARGUMENT, "\n".join(problems))
