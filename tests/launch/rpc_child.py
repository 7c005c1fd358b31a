"""A child that makes one RPC to the server named in SERVER_ADDRESS, then reports ready and ends."""

import os
import sys

from pdserve.launch.child import main
from pdserve.launch.roles import Ready, RunService
from pdserve.serving.settings import Settings


def _service(_role: str) -> RunService:
    def run(settings: Settings, ready: Ready) -> int:
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        from pdserve.client.channels import sync_channel

        with sync_channel(os.environ["SERVER_ADDRESS"]) as channel:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        ready({"status": reply.status})
        return 0

    return run


if __name__ == "__main__":
    sys.exit(main(load=_service))
