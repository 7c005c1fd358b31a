"""Runs tasks one after another, each in a process of its own; leaves none behind. Imports no torch."""

import os
import subprocess
import sys
from collections.abc import Sequence

from pydantic import TypeAdapter

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.launch.roles import thread_environment
from pdserve_bench.engine.plan import Task
from pdserve_bench.engine.results import ConfigurationResult

COMMAND = (sys.executable, "-m", "pdserve_bench.engine.child")


def run_tasks(tasks: Sequence[Task]) -> list[ConfigurationResult]:
    """Raises PdserveError for the first that fails; its log on stderr says why."""
    return [_run(task) for task in tasks]


def _run(task: Task) -> ConfigurationResult:
    line = TypeAdapter(Task).dump_json(task) + b"\n"
    environment = {**os.environ, **thread_environment(task.configuration.num_threads)}
    # In a session of its own, so that a terminal's Ctrl-C reaches this process alone.
    process = subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            process.stdin.write(line)
            process.stdin.flush()
            output = process.stdout.read()
            code = process.wait()
        finally:
            process.kill()
            process.wait()
    if code != 0:
        raise PdserveError(ErrorReason.INTERNAL, f"the measurement of {task.configuration} ended with exit code {code}")
    return TypeAdapter(ConfigurationResult).validate_json(output.splitlines()[-1])
