"""What a study leaves on disk."""

import csv
import json
from pathlib import Path

from pdserve_bench.study.report import headlines, study_tables, write_study
from tests.bench.study.studies import APART, study


def test_every_file_is_there_and_says_the_same(tmp_path: Path) -> None:
    made = study(tmp_path)
    written = write_study(made, tmp_path / "report")
    assert {path.name for path in written} == {"result.json", "runs.csv", "report.html", "itl.png", "ratios.png"}
    found = json.loads((tmp_path / "report" / "result.json").read_text())
    assert [one["decision"] for one in found["answers"]] == ["disaggregate", "disaggregate"]
    assert found["conditions"]["settings"]["model_fingerprint"] == "a fingerprint"
    assert {target["met"] for target in found["targets"] if target["name"].startswith("p99 ITL")} == {True}
    assert found["targets"][-1]["name"].startswith("load generator against an instant server")
    page = (tmp_path / "report" / "report.html").read_text()
    assert all(line.split(":")[0] in page for line in headlines(made))
    assert page.count("<svg") >= 10


def test_the_csv_has_a_row_for_each_run_and_class(tmp_path: Path) -> None:
    made = study(tmp_path)
    write_study(made, tmp_path)
    with (tmp_path / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(made.result.measured)
    assert {row["class"] for row in rows} == {"all", "default"}
    ours = [row for row in rows if row["fleet"] == APART]
    assert all(abs(float(row["itl_p99_s"]) - 0.02) < 0.001 for row in ours)


def test_the_terminal_gets_demand_and_targets(tmp_path: Path) -> None:
    titles = [str(table.title) for table in study_tables(study(tmp_path))]
    assert len(titles) == 2
    assert titles[-1] == "Targets"


def test_one_rate_is_enough(tmp_path: Path) -> None:
    assert write_study(study(tmp_path, rates=(1.0,)), tmp_path / "report")
