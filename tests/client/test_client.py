import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from pdserve.client import AsyncClient, Client, Completion, Delta, Finished, GenerateOptions, PdserveError, Started
from pdserve.client.channels import bind, sync_server
from pdserve.client.errors import error_metadata, grpc_status
from pdserve.core.errors import ErrorReason
from pdserve.core.sampling import FinishReason
from pdserve.v1 import common_pb2
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server


class CannedService(InferenceServicer):
    """Says "hi" and remembers what it was asked. The text "fail" fails after a token; "hang" waits to be cancelled."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.keys: list[object] = []
        self.cancelled = threading.Event()

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        context.add_callback(self.cancelled.set)
        self.requests.append(request)
        self.keys.append(dict(context.invocation_metadata()).get("authorization"))
        yield pb.GenerateResponse(started=pb.GenerateResponse.Started(num_prompt_tokens=3, seed=9, model="m"))
        yield pb.GenerateResponse(delta=pb.GenerateResponse.Delta(token_ids=[1, 2], text="hi"))
        if request.text == "fail":
            error = PdserveError(ErrorReason.WORKER_LOST, "lost", retry_after_s=2)
            context.set_trailing_metadata(error_metadata(error))
            context.abort(grpc_status(error), error.message)
        if request.text == "hang":
            self.cancelled.wait(20)
            return
        yield pb.GenerateResponse()
        yield pb.GenerateResponse(
            finished=pb.GenerateResponse.Finished(
                finish_reason=common_pb2.FINISH_REASON_LENGTH,
                usage=pb.Usage(prompt_tokens=3, completion_tokens=2),
                timings=pb.Timings(ttft_us=1_500_000, decode_worker="d"),
            )
        )

    def ListModels(self, request: pb.ListModelsRequest, context: grpc.ServicerContext) -> pb.ListModelsResponse:
        info = common_pb2.ModelInfo(name="m", context_length=64)
        return pb.ListModelsResponse(models=[pb.ServedModel(info=info, default_max_tokens=7, ready=True)])


@pytest.fixture
def service() -> Iterator[tuple[CannedService, str]]:
    canned, server = CannedService(), sync_server(4)
    add_InferenceServicer_to_server(canned, server)
    port = bind(server.add_insecure_port, "127.0.0.1", 0)
    server.start()
    yield canned, f"127.0.0.1:{port}"
    server.stop(None).wait(10)


Ask = Callable[..., Awaitable[list[object]]]


@pytest.fixture(params=["async", "sync"])
def ask(request: pytest.FixtureRequest, service: tuple[CannedService, str]) -> Ask:
    """All events of one request, through either client; with `complete`, the whole answer as the only one."""

    async def through_async(*args: object, complete: bool = False) -> list[object]:
        async with AsyncClient(service[1], api_key="k") as client:
            if complete:
                return [await client.complete(*args)]  # type: ignore[arg-type]
            return [event async for event in client.generate(*args)]  # type: ignore[arg-type]

    async def through_sync(*args: object, complete: bool = False) -> list[object]:
        def all_events() -> list[object]:
            with Client(service[1], api_key="k") as client:
                return [client.complete(*args)] if complete else list(client.generate(*args))  # type: ignore[arg-type]

        with ThreadPoolExecutor(1) as pool:
            return await asyncio.get_running_loop().run_in_executor(pool, all_events)

    return through_async if request.param == "async" else through_sync


async def test_typed_events_and_unknown_ones_skipped(ask: Ask, service: tuple[CannedService, str]) -> None:
    started, delta, finished = await ask("hello", GenerateOptions(max_tokens=2, stop=["x"], deadline_s=1.5))
    assert isinstance(started, Started)
    assert (started.num_prompt_tokens, started.seed) == (3, 9)
    assert delta == Delta(0, 0, (1, 2), "hi")
    assert isinstance(finished, Finished)
    assert (finished.finish_reason, finished.timings.ttft_s) == (FinishReason.LENGTH, 1.5)
    (sent,) = service[0].requests
    assert (sent.text, sent.sampling.max_tokens, list(sent.sampling.stop), sent.deadline_ms) == (
        "hello",
        2,
        ["x"],
        1500,
    )
    assert not sent.sampling.HasField("temperature")
    assert service[0].keys == ["Bearer k"]


async def test_a_servers_error_arrives_typed(ask: Ask) -> None:
    with pytest.raises(PdserveError) as caught:
        await ask("fail")
    assert (caught.value.reason, caught.value.retry_after_s) == (ErrorReason.WORKER_LOST, 2.0)


async def test_whole_answers(ask: Ask) -> None:
    (answer,) = await ask("hello", complete=True)
    assert isinstance(answer, Completion)
    assert (answer.text, answer.started.seed) == ("hi", 9)
    (choice,) = answer.choices
    assert (choice.token_ids, choice.finish_reason, choice.usage.completion_tokens) == ((1, 2), FinishReason.LENGTH, 2)


async def test_a_failed_answer_is_no_answer(ask: Ask) -> None:
    with pytest.raises(PdserveError) as caught:
        await ask("fail", complete=True)
    assert caught.value.reason is ErrorReason.WORKER_LOST


async def test_a_choice_without_an_end_is_an_error(ask: Ask) -> None:
    with pytest.raises(PdserveError, match="before choice 1 was finished"):
        await ask("hello", GenerateOptions(n=2), complete=True)


async def test_leaving_early_cancels_the_call(service: tuple[CannedService, str]) -> None:
    async with AsyncClient(service[1]) as client:
        events = client.generate("hang")
        assert isinstance(events, AsyncIterator)
        await anext(events)
        await events.aclose()  # type: ignore[attr-defined]
        assert await asyncio.to_thread(service[0].cancelled.wait, 10)


def test_models(service: tuple[CannedService, str]) -> None:
    with Client(service[1]) as client:
        (model,) = client.list_models()
    assert (model.info.name, model.info.context_length, model.default_max_tokens, model.ready) == ("m", 64, 7, True)


async def test_a_server_that_is_not_there_is_an_error() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(PdserveError):
            await client.list_models()


def test_the_package_brings_no_tensors_and_no_server() -> None:
    """Whoever only wants to ask should not wait for torch."""
    code = "import sys, pdserve.client; print({'torch', 'numpy', 'fastapi', 'pydantic', 'tokenizers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
