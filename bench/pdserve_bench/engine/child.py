"""The process that measures one configuration: `python -m pdserve_bench.engine.child`.

stdin: one JSON line, the task, then silence; its end means the parent is gone, and ends this process. stdout: one JSON
line, the result. The environment must have the thread counts already; torch is imported once the cores are set.
"""

import logging
import os
import sys
import threading

from pydantic import TypeAdapter

from pdserve.core.errors import PdserveError
from pdserve.serving.logs import configure_logging
from pdserve_bench.engine.plan import Task

_log = logging.getLogger(__name__)


def main() -> int:
    task = TypeAdapter(Task).validate_json(sys.stdin.buffer.readline())
    configure_logging("warning", "bench", str(task.configuration))
    logging.getLogger("pdserve_bench").setLevel("INFO")
    os.sched_setaffinity(0, task.cores)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()

    from pdserve_bench.engine.measure import measure
    from pdserve_bench.engine.results import ConfigurationResult

    try:
        result = measure(task)
    except PdserveError as error:
        _log.error("%s", error.message)
        return 1
    sys.stdout.buffer.write(TypeAdapter(ConfigurationResult).dump_json(result) + b"\n")
    return 0


def _end_with_parent() -> None:
    # Not by sys.stdin: a thread that holds its lock would keep the interpreter from ending.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
