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
    unknown = [_unknown(name, item.origin) for name, item in given.items() if name not in _FIELDS]
    if unknown:
        raise _refusal(unknown)
    try:
        settings = Settings.model_validate(_nested(given))
    except ValidationError as error:
        raise _refusal(_explain(error, given)) from None
    problems = contradictions(settings)
    if problems:
        raise _refusal(problems)
    return settings


WILDCARDS = ("0.0.0.0", "::", "*")


def contradictions(settings: Settings) -> list[str]:
    """What no single field shows to be impossible, one line each."""
    coordinator, worker = settings.coordinator, settings.worker
    checks = (
        (
            coordinator.heartbeat_s >= worker.lease_s,
            f"coordinator.heartbeat_s ({coordinator.heartbeat_s:g}) must be below worker.lease_s "
            f"({worker.lease_s:g}), or reservations end between two heartbeats",
        ),
        (
            coordinator.report_interval_s >= coordinator.stalled_after_s,
            f"coordinator.report_interval_s ({coordinator.report_interval_s:g}) must be below "
            f"coordinator.stalled_after_s ({coordinator.stalled_after_s:g}), or every idle worker counts as stalled",
        ),
        (
            coordinator.default_deadline_s > coordinator.max_deadline_s,
            f"coordinator.default_deadline_s ({coordinator.default_deadline_s:g}) must not exceed "
            f"coordinator.max_deadline_s ({coordinator.max_deadline_s:g})",
        ),
        (
            coordinator.http_port == coordinator.grpc_port != 0,
            f"coordinator.http_port and coordinator.grpc_port are both {coordinator.grpc_port}",
        ),
        (
            worker.control_port == worker.kv_port != 0,
            f"worker.control_port and worker.kv_port are both {worker.kv_port}",
        ),
        (
            worker.host in WILDCARDS and not worker.advertise_host,
            f"worker.host is {worker.host}, which nobody can dial: give worker.advertise_host (--advertise-host)",
        ),
        (not settings.transfer.transports, "transfer.transports must name at least one transport"),
        (any(core < 0 for core in worker.cores), "worker.cores must not be negative"),
        (len(set(worker.cores)) != len(worker.cores), "worker.cores names a core twice"),
    )
    addresses = [
        f"worker.coordinators: {address!r} is not HOST:PORT"
        for address in worker.coordinators
        if not is_address(address)
    ]
    return [message for wrong, message in checks if wrong] + addresses


def is_address(text: str) -> bool:
    """Whether `text` is HOST:PORT; an IPv6 host stands in brackets."""
    host, separator, port = text.rpartition(":")
    bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    return bool(separator and host and not bare_ipv6 and port.isascii() and port.isdigit() and 0 < int(port) < 65536)


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


def _unknown(name: str, origin: str) -> str:
    near = difflib.get_close_matches(name, _FIELDS, n=1)
    return f"unknown setting {name} ({origin})" + (f": did you mean {near[0]}?" if near else "")


def _explain(error: ValidationError, given: Mapping[str, _Given]) -> list[str]:
    lines: list[str] = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        name = ".".join(str(part) for part in problem["loc"][:2])
        name = name if name in _FIELDS else name.partition(".")[0]
        origin = given[name].origin if name in given else "default"
        lines.append(f"{_described(name, given)} ({origin}): {problem['msg'].replace('Input should', 'should')}")
    return list(dict.fromkeys(lines))


def _described(name: str, given: Mapping[str, _Given]) -> str:
    return name if name in _SECRET or name not in given else f"{name} = {given[name].value!r}"


def _refusal(problems: list[str]) -> PdserveError:
    return PdserveError(ErrorReason.INVALID_ARGUMENT, "\n".join(problems))
