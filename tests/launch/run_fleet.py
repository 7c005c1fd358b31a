"""A launcher process whose children are fakes. argv: settings as JSON. Prints one JSON line when all serve."""

import json
import logging
import sys
from pathlib import Path

from pdserve.launch.local import LocalFleet, RunningFleet
from pdserve.launch.machine import this_machine
from pdserve.serving.settings import Settings

FAKE_CHILD = str(Path(__file__).with_name("fake_child.py"))


def _command(role: str, control_fd: int, ready_fd: int) -> list[str]:
    return [sys.executable, FAKE_CHILD, role, "--control-fd", str(control_fd), "--ready-fd", str(ready_fd)]


def _report(fleet: RunningFleet) -> None:
    loaded = sorted({"grpc", "torch", "google.protobuf"} & sys.modules.keys())
    workers = [info for _, info in fleet.workers]
    _say({"workers": workers, "loaded": loaded, "grpc_port": fleet.grpc_port})


def _say(report: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


def main() -> int:
    logging.basicConfig(level=logging.INFO)
    settings = Settings.model_validate_json(sys.argv[1])
    code = LocalFleet(settings, this_machine(), _report, _command).run()
    _say({"loaded": sorted({"grpc", "torch"} & sys.modules.keys())})
    return code


if __name__ == "__main__":
    sys.exit(main())
