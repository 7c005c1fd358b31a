"""What a worker's process does before it imports anything that computes."""

import json
import os
import subprocess
import sys

import pytest

from pdserve.core.errors import PdserveError
from pdserve.launch.roles import POOL_VARIABLES, prepare_worker, thread_environment
from pdserve.serving.settings import Settings, WorkerSettings

HEAVY = ("numba", "numpy", "torch")
PREPARE = """
import json, logging, os, sys, threading
logging.basicConfig()
threading.Thread(target=threading.Event().wait, daemon=True).start()
from pdserve.launch.roles import POOL_VARIABLES, run_service
from pdserve.serving.settings import Settings
def load(role):
    def run(settings, ready):
        tasks = [int(task) for task in os.listdir("/proc/self/task")]
        print(json.dumps({
            "affinity": [sorted(os.sched_getaffinity(task)) for task in tasks],
            "pools": [os.environ.get(name) for name in POOL_VARIABLES],
        }))
        return 0
    return run
settings = Settings.model_validate_json(sys.argv[1])
sys.exit(run_service(sys.argv[2], settings, print, load))
"""


def _run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(path for path in sys.path if path)
    own = {name: value for name, value in os.environ.items() if name not in POOL_VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**own, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


def _settings(**worker: object) -> str:
    return Settings(worker=WorkerSettings.model_validate(worker)).model_dump_json()


def test_all_threads_are_pinned_and_every_pool_is_bounded() -> None:
    core = max(os.sched_getaffinity(0))
    done = _run(PREPARE, _settings(threads=3, cores=[core]), "decode")
    report = json.loads(done.stdout)
    assert report["affinity"] == [[core], [core]]
    assert report["pools"] == ["3"] * len(POOL_VARIABLES)
    assert done.stderr == ""


def test_the_setting_wins_over_the_environment_and_says_so() -> None:
    done = _run(PREPARE, _settings(threads=2), "decode", OMP_NUM_THREADS="16", NUMBA_NUM_THREADS="2")
    assert json.loads(done.stdout)["pools"] == ["2"] * len(POOL_VARIABLES)
    assert done.stderr.splitlines() == ["WARNING:pdserve.launch.roles:worker.threads = 2 overrides OMP_NUM_THREADS=16"]


def test_a_coordinator_is_left_alone() -> None:
    core = max(os.sched_getaffinity(0))
    report = json.loads(_run(PREPARE, _settings(cores=[core]), "coordinator").stdout)
    assert report["affinity"][0] == sorted(os.sched_getaffinity(0))
    assert set(report["pools"]) == {None}


@pytest.mark.parametrize("module", ["pdserve.cli.app", "pdserve.launch.child"])
def test_nothing_that_reads_the_variables_is_imported_before_they_are_set(module: str) -> None:
    code = f"import sys, {module}, pdserve.launch.roles; print([name for name in {HEAVY} if name in sys.modules])"
    assert _run(code).stdout == "[]\n"


def test_a_core_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in thread_environment(1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PdserveError, match=r"worker\.cores: cannot pin to 1000000"):
        prepare_worker(Settings(worker=WorkerSettings(cores=(1_000_000,))))
