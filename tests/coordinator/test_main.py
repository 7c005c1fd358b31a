import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.generation.served_model import ServedModels
from coordinator.main import CoordinatorProcess, load_models
from pdserve.client.channels import aio_channel
from pdserve.client.wire import model_info_to_proto
from pdserve.core.errors import PdserveError
from pdserve.serving.settings import CoordinatorSettings, ModelSettings, Settings
from tests.support.scheduling_rig import WAIT_S
from tests.support.scripted_worker import DECODE, MODEL, PREFILL, ScriptedWorker
from tests.support.tiny_models import write_tiny_llama


@dataclass
class Running:
    process: CoordinatorProcess
    ports: dict[str, object]
    task: "asyncio.Task[int]"
    http: httpx.AsyncClient
    models: ServedModels
    workers: dict[str, ScriptedWorker] = field(default_factory=dict)

    async def add_workers(self, model: str = MODEL.name, number: int = 0) -> ScriptedWorker:
        """One of each role for the model; the decode worker is returned once the model is ready."""
        info = self.models.get(model).info
        registration = {"model_name": model, "model": model_info_to_proto(info)}
        for name, role in ((f"p{number}", PREFILL), (f"d{number}", DECODE)):
            worker = ScriptedWorker(name, (role,), self.workers, overrides=registration)
            await worker.start(f"127.0.0.1:{self.ports['grpc_port']}")
        async with asyncio.timeout(WAIT_S):
            while not (await self.ready())[model]:
                pass
        return self.workers[f"d{number}"]

    async def ready(self) -> dict[str, bool]:
        """Each served model's own flag."""
        return {model["id"]: model["ready"] for model in (await self.http.get("/v1/models")).json()["data"]}

    async def until_grpc_health(self, status: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while await health(self) != status:
                pass

    async def until_health(self, status: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while (await self.http.get("/health")).status_code != status:
                pass


@asynccontextmanager
async def running(tmp_path: Path, more: tuple[str, ...] = (), **settings: object) -> AsyncIterator[Running]:
    """`more`: names of further models."""
    values = {"http_port": 0, "grpc_port": 0, "drain_s": 10.0, **settings}
    served = [
        ModelSettings(source=str(write_tiny_llama(tmp_path / name, seed=seed)), served_name=name, dtype="float32")
        for seed, name in enumerate((MODEL.name, *more))
    ]
    all_settings = Settings(
        model=served[0], more_models=tuple(served[1:]), coordinator=CoordinatorSettings.model_validate(values)
    )
    models = load_models(all_settings)
    process = CoordinatorProcess(all_settings, models)
    ready: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(process.serve(ready.set_result))
    ports = await asyncio.wait_for(ready, WAIT_S)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports['http_port']}", timeout=WAIT_S) as http:
        run = Running(process, ports, task, http, models)
        try:
            yield run
        finally:
            process.stop()
            process.stop()
            assert await asyncio.wait_for(task, WAIT_S) == 0
            for worker in list(run.workers.values()):
                await worker.kill()


async def health(run: Running) -> int:
    async with aio_channel(f"127.0.0.1:{run.ports['grpc_port']}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service="pdserve.v1.Inference"))).status


async def test_serves_a_request_end_to_end_and_reports_health(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        assert (await run.http.get("/health")).status_code == 503
        assert await health(run) == health_pb2.HealthCheckResponse.NOT_SERVING
        await run.add_workers()
        answer = await run.http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 5})
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert await health(run) == health_pb2.HealthCheckResponse.SERVING
        metrics = (await run.http.get("/metrics")).text
        assert 'pdserve:requests_total{model="tiny",outcome="length"} 1.0' in metrics


async def test_two_models_are_ready_each_by_its_own_workers_and_healthy_together(tmp_path: Path) -> None:
    async with running(tmp_path, more=("other",)) as run:
        assert await run.ready() == {"tiny": False, "other": False}
        await run.add_workers()
        assert await run.ready() == {"tiny": True, "other": False}
        unhealthy = await run.http.get("/health")
        assert (unhealthy.status_code, "other" in unhealthy.text, "tiny" in unhealthy.text) == (503, True, False)
        assert await health(run) == health_pb2.HealthCheckResponse.NOT_SERVING
        other = await run.add_workers("other", number=1)
        assert (await run.http.get("/health")).status_code == 200
        await run.until_grpc_health(health_pb2.HealthCheckResponse.SERVING)

        body = {"prompt": "hello", "max_tokens": 5}
        for name in ("tiny", "other"):
            answer = await run.http.post("/v1/completions", json={"model": name, **body})
            assert (answer.status_code, answer.json()["model"]) == (200, name)
        assert [len(run.workers[name].submits) for name in ("p0", "d0", "p1", "d1")] == [1, 1, 1, 1]
        refused = await run.http.post("/v1/completions", json={"model": "third", **body})
        assert refused.status_code == 404
        assert "served: other, tiny" in refused.json()["error"]["message"]

        await other.leave()
        await run.until_health(503)
        await run.until_grpc_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        assert await run.ready() == {"tiny": True, "other": False}
        assert (await run.http.post("/v1/completions", json={"model": "tiny", **body})).status_code == 200
        assert (await run.http.post("/v1/completions", json={"model": "other", **body})).status_code == 503


def test_a_model_that_cannot_be_loaded_is_named_whichever_it_is(tmp_path: Path) -> None:
    good = ModelSettings(source=str(write_tiny_llama(tmp_path / "good")))
    broken = write_tiny_llama(tmp_path / "broken")
    (broken / "config.json").write_text("{}")
    with pytest.raises(PdserveError, match="broken"):
        load_models(Settings(model=good, more_models=(ModelSettings(source=str(broken)),)))


async def test_sigterm_drains_the_running_refuses_the_new_and_ends(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        decode = await run.add_workers()
        decode.script.decode.clear()
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 5}
        request = asyncio.create_task(run.http.post("/v1/completions", json=body))
        await asyncio.wait_for(decode.decode_began.wait(), WAIT_S)
        os.kill(os.getpid(), signal.SIGTERM)
        await run.until_health(503)
        refused = await run.http.post("/v1/completions", json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert not run.task.done()
        decode.script.decode.set()
        answer = await request
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert await asyncio.wait_for(run.task, WAIT_S) == 0


async def test_what_does_not_end_in_time_gets_an_explicit_error(tmp_path: Path) -> None:
    async with running(tmp_path, drain_s=0.2) as run:
        decode = await run.add_workers()
        decode.script.decode.clear()
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 5, "stream": True}
        request = asyncio.create_task(run.http.post("/v1/completions", json=body))
        await asyncio.wait_for(decode.decode_began.wait(), WAIT_S)
        run.process.stop()
        lines = [line.removeprefix("data: ") for line in (await request).text.splitlines() if line]
        assert json.loads(lines[-1])["error"]["code"] == "draining"
        assert await asyncio.wait_for(run.task, WAIT_S) == 0


@pytest.mark.parametrize("module", ["coordinator.main", "coordinator.scheduling.dispatcher"])
def test_the_coordinator_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'triton', 'kv_transfer') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
