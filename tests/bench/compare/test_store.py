"""Measured cells outlive a comparison that was broken off; stale, broken and partial ones are measured again."""

import json
import logging
import subprocess
from pathlib import Path

import pytest

from pdserve_bench.compare.store import Store, conditions_digest, plan_digest, sources_revision
from pdserve_bench.load.records import RunResult
from tests.bench.compare.runs import made_run, small_plan


class Runs:
    """Counts how often something is measured."""

    def __init__(self, result: RunResult | None = None) -> None:
        self.result = result or made_run()
        self.count = 0

    def __call__(self) -> RunResult:
        self.count += 1
        return self.result


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    runs = Runs()
    assert Store(tmp_path / "new").get_or_run("a cell", "d1", runs) == runs.result
    assert Store(tmp_path / "new").get_or_run("a cell", "d1", runs) == runs.result
    assert runs.count == 1
    Store(tmp_path / "new").get_or_run("another", "d1", runs)
    assert runs.count == 2


def test_other_conditions_are_measured_again_and_replace_the_old(tmp_path: Path) -> None:
    store, runs = Store(tmp_path), Runs()
    store.get_or_run("cell", "d1", runs)
    runs.result = made_run(itl_s=0.07)
    assert store.get_or_run("cell", "d2", runs) == runs.result
    assert store.get_or_run("cell", "d2", Runs()) == runs.result
    assert runs.count == 2
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "text", ["", '{"key": "cell"', "[]", "3", '{"key": "cell", "conditions_digest": "d1", "run": {"name": "A"}}']
)
def test_a_broken_file_is_measured_again_with_a_warning(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, runs = Store(tmp_path), Runs()
    store.path("cell").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert store.get_or_run("cell", "d1", runs) == runs.result
    assert "is broken and will be measured again" in caplog.text
    assert store.get_or_run("cell", "d1", Runs(made_run(itl_s=9.0))) == runs.result


def test_what_ends_a_measurement_leaves_what_was_there(tmp_path: Path) -> None:
    store, runs = Store(tmp_path), Runs()
    store.get_or_run("cell", "d1", runs)

    def interrupted() -> RunResult:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.get_or_run("cell", "d2", interrupted)
    assert store.get_or_run("cell", "d1", runs) == runs.result
    assert runs.count == 1


def test_an_interrupted_run_is_kept_but_measured_again(tmp_path: Path) -> None:
    store, runs = Store(tmp_path), Runs(made_run(interrupted=True))
    assert store.get_or_run("cell", "d1", runs).interrupted
    assert json.loads(store.path("cell").read_text())["run"]["interrupted"] is True
    runs.result = made_run()
    assert store.get_or_run("cell", "d1", runs) == runs.result
    assert store.get_or_run("cell", "d1", runs) == runs.result
    assert runs.count == 2


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, runs = Store(tmp_path), Runs()
    store.get_or_run("cell", "d1", runs)

    def fail(path: Path, text: str, **_: object) -> None:
        with path.open("w") as file:
            file.write(text[:20])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="disk full"):
        store.get_or_run("cell", "d2", Runs(made_run(itl_s=0.07)))
    monkeypatch.undo()
    assert store.get_or_run("cell", "d1", Runs(made_run(itl_s=9.0))) == runs.result


def test_keys_that_read_alike_have_files_of_their_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    keys = ["rate 1, A (again)", "rate 1, A -again-", "../../etc/passwd", "", "x" * 500]
    paths = {store.path(key) for key in keys}
    assert len(paths) == len(keys)
    assert {path.parent for path in paths} == {tmp_path}


def test_digests_tell_conditions_apart() -> None:
    settings = {"model": "m", "run": {"drain_s": 60.0, "max_concurrency": None}}
    reordered = {"run": {"max_concurrency": None, "drain_s": 60.0}, "model": "m"}
    first = conditions_digest(settings, "r1")
    assert first == conditions_digest(reordered, "r1")
    assert len({first, conditions_digest(settings, "r2"), conditions_digest({**settings, "model": "n"}, "r1")}) == 3


def test_digests_tell_plans_apart_by_what_is_sent() -> None:
    plan = small_plan()
    assert plan_digest(plan) == plan_digest(small_plan())
    others = [small_plan(seed=2), small_plan(gap_s=0.02), small_plan(2), small_plan(first_id=11)]
    assert len({plan_digest(one) for one in [plan, *others]}) == 5


def test_the_revision_is_of_the_sources(tmp_path: Path) -> None:
    assert sources_revision(tmp_path) == "unknown"
    assert sources_revision() == sources_revision() != ""


def test_the_revision_changes_with_what_a_run_depends_on_and_with_nothing_else(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t", *words], check=True)

    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return sources_revision(path.parent)

    git("init", "-q")
    for name in ("engine/a.py", "docs/a.md", "tests/a.py", "README.md"):
        write(name, "1")
    git("add", "-A")
    git("commit", "-qm", "one")
    first = sources_revision(tmp_path)
    assert [write(name, "2") for name in ("docs/a.md", "tests/a.py", "README.md")] == [first] * 3
    git("commit", "-qam", "two")
    assert sources_revision(tmp_path) == first
    changed = write("engine/a.py", "2")
    assert changed != first
    git("commit", "-qam", "three")
    assert sources_revision(tmp_path) not in (first, changed)
    assert sources_revision(tmp_path / "engine") == sources_revision(tmp_path)
