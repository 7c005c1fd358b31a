"""Targets, and the result file around them."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from pdserve_bench.report import result, targets_table, write_result
from pdserve_bench.targets import Op, Target


@pytest.mark.parametrize(
    ("value", "op", "met"),
    [
        (1.5, "<=", True),
        (1.6, "<=", True),
        (1.7, "<=", False),
        (1.5, ">=", False),
        (1.6, ">=", True),
        (1.7, ">=", True),
        (float("nan"), "<=", False),
        (float("nan"), ">=", False),
    ],
)
def test_a_bound_includes_itself(value: float, op: Op, met: bool) -> None:
    assert Target("step", "floors", op, value, 1.6, 0.0).met is met


def test_the_result_file_has_what_a_machine_looks_for(tmp_path: Path) -> None:
    target = Target("step", "floors", "<=", 1.7, 1.6, 0.02)
    write_result(tmp_path / "r.json", result("engine", {"seeds": {"a": 1}}, {"cells": [1]}, [target]))
    assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8")) == {
        "benchmark": "engine",
        "conditions": {"seeds": {"a": 1}},
        "cells": [1],
        "targets": [
            {
                "name": "step",
                "unit": "floors",
                "op": "<=",
                "value": 1.7,
                "target": 1.6,
                "noise": 0.02,
                "met": False,
            }
        ],
    }


def test_no_file_is_written_of_a_number_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_result(tmp_path / "r.json", {"value": float("nan")})
    assert not (tmp_path / "r.json").exists()


def test_the_table_says_what_is_missed_and_what_is_noisy() -> None:
    console = Console(width=120)
    targets = [Target("a", "s", "<=", 3.0, 2.0, 0.05), Target("b", "s", "<=", 1.0, 2.0, 0.5)]
    with console.capture() as capture:
        console.print(targets_table(targets))
    lines = [line.split() for line in capture.get().splitlines()[2:]]
    assert lines == [["a", "3", "<=", "2", "s", "no"], ["b", "1", "<=", "2", "s", "yes", "(noisy)"]]
