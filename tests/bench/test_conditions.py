"""The conditions that a result records."""

import json
import subprocess
from pathlib import Path

import torch

from pdserve_bench.conditions import conditions, git_revision, machine

CPUINFO = """processor\t: 0
model name\t: Some CPU @ 2 GHz
cpu family\t: 25
model\t\t: 17
flags\t\t: fpu avx2 fma sse avx512_bf16

processor\t: 1
model name\t: Another
"""


def test_conditions_are_json_and_name_versions_and_settings() -> None:
    found = json.loads(json.dumps(conditions({"batch": 8}, {"ids": 3}, 0.04)))
    assert (found["settings"], found["seeds"], found["foreign_cores"]) == ({"batch": 8}, {"ids": 3}, 0.04)
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["memory_bytes"] > 0


def test_the_machine_is_its_first_processor(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO, encoding="utf-8")
    found = machine(tmp_path / "cpuinfo")
    assert (found["cpu"], found["cpu_family_model"]) == ("Some CPU @ 2 GHz", "25/17")
    assert found["flags"] == ["avx2", "fma", "avx512_bf16"]


def test_a_revision_tells_changed_sources(tmp_path: Path) -> None:
    assert git_revision(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    (tmp_path / "a").write_text("1", encoding="utf-8")
    for command in (["init", "-q"], ["add", "a"], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *command], check=True)
    clean = git_revision(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "a").write_text("2", encoding="utf-8")
    assert git_revision(tmp_path) == f"{clean}-dirty"
