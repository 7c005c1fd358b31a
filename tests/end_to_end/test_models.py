"""Two models in one fleet of real processes: each answers as it does alone, and neither holds the other up."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transformers import PreTrainedModel

from pdserve.client.channels import aio_channel
from pdserve.client.inference import Delta, GenerateOptions
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_files import open_model_files
from pdserve.core.tokenizer import load_tokenizer
from pdserve.serving.settings_loader import load_settings
from tests.support.fleet import DISAGGREGATED, Fleet, live_workers, run_fleet
from tests.support.oracle import build_oracle, greedy_after, oracle_greedy
from tests.support.tiny_models import write_tiny_llama

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 24
GREEDY = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
PROMPTS = [[3 + (start * 7 + i * 5) % 250 for i in range(length)] for start, length in enumerate((3, 16, 33, 100))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By served name; they differ in vocabulary, depth, width and weights."""
    folder = tmp_path_factory.mktemp("models")
    wide = {"vocab_size": 350, "num_layers": 3, "hidden_size": 96, "num_heads": 6, "context_length": 512, "seed": 5}
    return {
        "ash": write_tiny_llama(folder / "ash"),
        "birch": write_tiny_llama(folder / "birch", **wide),
    }


@asynccontextmanager
async def two_models(models: Mapping[str, Path]) -> AsyncIterator[tuple[Fleet, httpx.AsyncClient]]:
    first, second = models.values()
    async with (
        run_fleet(first, DISAGGREGATED, (second,)) as fleet,
        httpx.AsyncClient(base_url=fleet.http_url, timeout=60) as http,
    ):
        yield fleet, http


async def text_over_http(http: httpx.AsyncClient, model: str, prompt: Sequence[int]) -> str:
    answer = await http.post("/v1/completions", json={"model": model, "prompt": prompt, **GREEDY})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["text"]


async def test_interleaved_requests_are_answered_as_by_each_model_alone(models: dict[str, Path]) -> None:
    judges: dict[str, PreTrainedModel] = {name: build_oracle(path) for name, path in models.items()}
    expected = {name: [tuple(oracle_greedy(judge, p, NUM_TOKENS)) for p in PROMPTS] for name, judge in judges.items()}
    assert not set(expected["ash"]) & set(expected["birch"])
    async with two_models(models) as (fleet, http):
        cases = [(name, index) for index in range(len(PROMPTS)) for name in models]
        outputs, texts = await asyncio.gather(
            asyncio.gather(*(fleet.generate(PROMPTS[i], model=name, **GREEDY) for name, i in cases)),
            asyncio.gather(*(text_over_http(http, name, PROMPTS[i]) for name, i in cases)),
        )
        for (name, index), output, text in zip(cases, outputs, texts, strict=True):
            assert output.token_ids == expected[name][index]
            assert text == output.text
            timings = output.finished.timings
            assert (timings.prefill_worker, timings.decode_worker) == (f"{name}.prefill-0", f"{name}.decode-0")

        for name, status, reason in (
            ("oak", 404, ErrorReason.MODEL_NOT_FOUND),
            ("", 400, ErrorReason.INVALID_ARGUMENT),
        ):
            refusal = await http.post("/v1/completions", json={"model": name, "prompt": [5]})
            assert refusal.status_code == status
            assert "ash, birch" in refusal.json()["error"]["message"]
            with pytest.raises(PdserveError, match=r"ash, birch") as caught:
                await fleet.generate([5], model=name)
            assert caught.value.reason is reason
        with pytest.raises(PdserveError) as caught:
            await fleet.generate([320], model="ash")
        assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
        assert len((await fleet.generate([320], model="birch", **GREEDY)).token_ids) == NUM_TOKENS
        await fleet.until_idle()


async def test_the_other_model_goes_on_when_one_loses_its_decode_worker(models: dict[str, Path]) -> None:
    async with two_models(models) as (fleet, http):
        alone = (await fleet.generate(PROMPTS[0], model="ash", **{**GREEDY, "max_tokens": 400})).token_ids
        cut = fleet.client.generate(PROMPTS[0], GenerateOptions(model="birch", ignore_eos=True, max_tokens=500))
        async for event in cut:
            if isinstance(event, Delta) and event.first_index > 0:
                break
        running = asyncio.create_task(fleet.generate(PROMPTS[0], model="ash", **{**GREEDY, "max_tokens": 400}))
        await fleet.service("birch.decode-0").stop(signal.SIGKILL)
        with pytest.raises(PdserveError) as caught:
            async for _ in cut:
                pass
        assert caught.value.reason is ErrorReason.WORKER_LOST
        await fleet.until(lambda status: "birch.decode-0" not in live_workers(status))

        health = await http.get("/health")
        assert health.status_code == 503
        assert "birch" in health.json()["reason"]
        assert "ash" not in health.json()["reason"]
        assert {m["id"]: m["ready"] for m in (await http.get("/v1/models")).json()["data"]} == {
            "ash": True,
            "birch": False,
        }
        async with aio_channel(fleet.grpc_address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            status = (await stub.Check(health_pb2.HealthCheckRequest(service="pdserve.v1.Inference"))).status
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        refusal = await http.post("/v1/completions", json={"model": "birch", "prompt": [5, 6]})
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "no_workers")
        assert (await running).token_ids == alone
        assert await text_over_http(http, "ash", PROMPTS[1])

        await fleet.launch_worker("decode", "birch.decode-1", models["birch"]).info()
        await fleet.until(lambda status: "birch.decode-1" in live_workers(status))
        assert (await http.get("/health")).status_code == 200
        assert await text_over_http(http, "birch", PROMPTS[1])


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1800)
async def test_two_real_models_beside_each_other(smollm2: Path, gemma3: Path) -> None:
    """Built-in models by name, each streaming while the other does, then Gemma's tokens against transformers'."""
    names = (smollm2.parent.name, gemma3.parent.name)
    settings: dict[str, Any] = {"cache_dir": str(load_settings({}, None, os.environ).cache_dir)}
    async with (
        run_fleet(Path(names[0]), DISAGGREGATED, (Path(names[1]),), **settings) as fleet,
        httpx.AsyncClient(base_url=fleet.http_url, timeout=300) as http,
    ):
        await stream_side_by_side(http, *names)
        await tokens_equal_transformers(fleet, gemma3)


async def stream_side_by_side(http: httpx.AsyncClient, smollm2: str, gemma3: str) -> None:
    """Gemma's file has no chat template."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0.0, "stream": True}
    chat = {"messages": question, "max_tokens": 32, "temperature": 0.0, "stream": True}
    answers = await asyncio.gather(
        http.post("/v1/chat/completions", json={"model": smollm2, **chat}),
        http.post("/v1/completions", json={"model": smollm2, **text}),
        http.post("/v1/completions", json={"model": gemma3, **text}),
    )
    for answer, word in zip(answers, ("Paris", "Paris", "France"), strict=True):
        assert answer.status_code == 200, answer.text
        assert answer.text.rstrip().endswith("data: [DONE]")
        assert "error" not in answer.text
        assert word in answer.text
    refusal = await http.post("/v1/chat/completions", json={"model": gemma3, **chat})
    assert (refusal.status_code, "template" in refusal.text) == (400, True)


async def tokens_equal_transformers(fleet: Fleet, gemma3: Path) -> None:
    """Ten prompts, around the window of 512 and beyond it."""
    judge = build_oracle(gemma3)
    text = load_tokenizer(open_model_files(gemma3)).encode((ROOT / "LICENSE").read_text())
    prompts = [text[:length] for length in (1, 5, 16, 33, 100, 255, 511, 512, 700, 1200)]
    options: dict[str, Any] = {"model": gemma3.parent.name, "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    outputs = await asyncio.gather(*(fleet.generate(prompt, **options) for prompt in prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        said = list(output.token_ids)
        assert (len(said), said) == (16, greedy_after(judge, prompt, said)), f"prompt of {len(prompt)} tokens"
