"""The cells of a capacity sweep in one file, so that a sweep that was broken off goes on where it stopped."""

import json
import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from pdserve_bench.serve.options import CannotMeasureError


class CellFile(MutableMapping[str, Mapping[str, Any]]):
    """As `capacity.Store`. Every change is written at one stroke: the file is always whole.

    `settings`: all that the cells depend on, as JSON.

    Raises:
        CannotMeasureError: the file is no such file, or holds cells that were measured under other settings.
        OSError: it cannot be read or written.
    """

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        self._path = path
        self._settings = json.loads(json.dumps(settings))
        self._cells: dict[str, Mapping[str, Any]] = self._read() if path.exists() else {}

    def _read(self) -> dict[str, Mapping[str, Any]]:
        try:
            document: Any = json.loads(self._path.read_text(encoding="utf-8"))
            settings, cells = document["settings"], dict(document["cells"])
        except (ValueError, KeyError, TypeError):
            raise CannotMeasureError(f"{self._path} holds no cells of a capacity sweep") from None
        if settings != self._settings:
            names = sorted(settings.keys() | self._settings.keys())
            other = [name for name in names if settings.get(name) != self._settings.get(name)]
            raise CannotMeasureError(f"{self._path} holds cells of another sweep: {', '.join(other)} differ")
        return cells

    def __getitem__(self, key: str) -> Mapping[str, Any]:
        return self._cells[key]

    def __setitem__(self, key: str, value: Mapping[str, Any]) -> None:
        self._cells[key] = value
        self._write()

    def __delitem__(self, key: str) -> None:
        del self._cells[key]
        self._write()

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    def _write(self) -> None:
        text = json.dumps({"settings": self._settings, "cells": self._cells}, indent=1, allow_nan=False)
        unfinished = self._path.with_name(self._path.name + ".part")
        unfinished.write_text(text + "\n", encoding="utf-8")
        os.replace(unfinished, self._path)
