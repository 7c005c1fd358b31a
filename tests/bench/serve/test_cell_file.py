"""Cells on disk: kept whole, and only for the sweep they are of."""

import json
from pathlib import Path

import pytest

from pdserve_bench.serve.cell_file import CellFile
from pdserve_bench.serve.options import CannotMeasureError

SETTINGS = {"model": "m", "duration_s": 5.0, "prompt": {"low": 1}}


def test_cells_outlive_the_process(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    first = CellFile(path, SETTINGS)
    assert not path.exists()
    first["a"] = {"x": 1}
    first["b"] = {"x": 2}
    del first["a"]
    assert dict(CellFile(path, SETTINGS)) == {"b": {"x": 2}}
    assert [one.name for one in tmp_path.iterdir()] == ["cells.json"]


def test_cells_of_another_sweep_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    CellFile(path, SETTINGS)["a"] = {}
    with pytest.raises(CannotMeasureError, match=r"cells of another sweep: duration_s, model differ"):
        CellFile(path, {**SETTINGS, "duration_s": 6, "model": "n"})


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"settings": {}})])
def test_what_is_no_file_of_cells_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cells.json"
    path.write_text(text)
    with pytest.raises(CannotMeasureError, match="holds no cells"):
        CellFile(path, SETTINGS)
    assert path.read_text() == text
