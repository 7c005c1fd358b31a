"""A child program: the real child side of a launch, and a service that does as FAKE_BEHAVIOURS (name → word) says."""

import json
import os
import signal
import sys
import threading

from pdserve.launch.child import main
from pdserve.launch.roles import COORDINATOR, Ready, RunService
from pdserve.serving.settings import Settings


def _service(role: str) -> RunService:
    def run(settings: Settings, ready: Ready) -> int:
        name = COORDINATOR if role == COORDINATOR else settings.worker.worker_id
        behaviour = json.loads(os.environ.get("FAKE_BEHAVIOURS", "{}")).get(name, "serve")
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(5))
        if behaviour == "fail":
            return 3
        if behaviour == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if behaviour != "never ready":
            ready(_info(name, settings))
        stop.wait()
        _note(f"stopped {name}")
        return 0

    return run


def _info(name: str, settings: Settings) -> dict[str, object]:
    return {
        "name": name,
        "pid": os.getpid(),
        "session": os.getsid(0),
        "http_port": 1,
        "grpc_port": 2,
        "settings": settings.model_dump(mode="json"),
        "affinity": sorted(os.sched_getaffinity(0)),
        "omp": os.environ.get("OMP_NUM_THREADS"),
    }


def _note(line: str) -> None:
    with open(os.environ["FAKE_EVENTS"], "a", encoding="utf-8") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main(load=_service))
