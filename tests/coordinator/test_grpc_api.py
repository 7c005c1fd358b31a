import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc
import grpc.aio
import pytest

from coordinator.auth import authenticator_for
from coordinator.generation.generator import Generator
from coordinator.grpc_api import InferenceService, add_inference_service
from pdserve.client.channels import aio_channel, aio_server, bind
from pdserve.client.errors import error_from_rpc
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.v1 import common_pb2
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.inference_pb2_grpc import InferenceStub
from tests.coordinator.text_fakes import (
    CONTEXT,
    EOS,
    RecordingObserver,
    Script,
    ScriptedScheduler,
    build_generator,
    echo_scheduler,
    scheduler_of,
    text_model,
)

Connect = Callable[[Generator], AbstractAsyncContextManager["grpc.aio.Channel"]]
IDS = pb.TokenIds(ids=[97, 98])
CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")])


@pytest.fixture
def connect() -> Connect:
    @asynccontextmanager
    async def connected(generator: Generator) -> AsyncIterator[grpc.aio.Channel]:
        server = aio_server()
        add_inference_service(InferenceService(generator, authenticator_for(generator.settings.api_keys)), server)
        port = bind(server.add_insecure_port, "127.0.0.1", 0)
        await server.start()
        try:
            async with aio_channel(f"127.0.0.1:{port}") as channel:
                yield channel
        finally:
            await server.stop(0)

    return connected


def generate(channel: grpc.aio.Channel, request: pb.GenerateRequest, **call: object):  # type: ignore[no-untyped-def]
    return InferenceStub(channel).Generate(request, timeout=call.pop("timeout", 20), **call)


async def failure(channel: grpc.aio.Channel, request: pb.GenerateRequest, **call: object) -> PdserveError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in generate(channel, request, **call):
            pass
    return error_from_rpc(caught.value)


async def test_started_then_deltas_then_finished(connect: Connect) -> None:
    async with connect(build_generator(scheduler := echo_scheduler(b"hey"))) as channel:
        request = pb.GenerateRequest(token_ids=IDS, sampling=pb.SamplingOptions(seed=5), request_label="job-1")
        events = [event async for event in generate(channel, request)]
    started, *deltas, finished = events
    assert (started.started.num_prompt_tokens, started.started.seed, started.started.model) == (2, 5, "tiny")
    assert "".join(event.delta.text for event in deltas) == "hey"
    assert [event.delta.first_index for event in deltas] == [0, 1, 2, 3]
    assert finished.finished.finish_reason == common_pb2.FINISH_REASON_STOP
    assert finished.finished.usage.completion_tokens == 4
    assert finished.finished.timings.ttft_us == 500_000
    assert scheduler.streams[0].request.label == "job-1"
    assert scheduler.num_cancels == 0


async def test_text_and_chat_prompts(connect: Connect) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="assistant"), pb.ChatMessage(role="user", content="x")])
    async with connect(build_generator(scheduler := echo_scheduler(b"a"))) as channel:
        for request in (pb.GenerateRequest(text="hi"), pb.GenerateRequest(chat=chat)):
            async for _ in generate(channel, request):
                pass
    prompts = [bytes(stream.request.token_ids) for stream in scheduler.streams]
    assert prompts == [b"hi", b"<assistant>\n<user>x\n<assistant>"]


def with_options(**options: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=IDS, sampling=pb.SamplingOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "param"),
    [
        (pb.GenerateRequest, "prompt"),
        (lambda: pb.GenerateRequest(text=""), "prompt"),
        (lambda: pb.GenerateRequest(token_ids=pb.TokenIds()), "prompt"),
        (lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 257])), "prompt[1]"),
        (lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * CONTEXT)), "prompt"),
        (lambda: pb.GenerateRequest(chat=pb.ChatPrompt()), "messages"),
        (lambda: pb.GenerateRequest(text="a", deadline_ms=0), "deadline_ms"),
        (lambda: pb.GenerateRequest(text="a", n=0), "n"),
        (lambda: pb.GenerateRequest(text="a", adapter="x"), "adapter"),
        (lambda: pb.GenerateRequest(chat=CHAT, echo=True), "echo"),
        (lambda: pb.GenerateRequest(chat=pb.ChatPrompt(messages=CHAT.messages, tools_json="{}")), "tools"),
        (lambda: pb.GenerateRequest(chat=pb.ChatPrompt(messages=CHAT.messages, tools_json="[")), "tools_json"),
        (lambda: with_options(temperature=float("nan")), "temperature"),
        (lambda: with_options(top_p=0.0), "top_p"),
        (lambda: with_options(max_tokens=0), "max_tokens"),
        (lambda: with_options(max_tokens=CONTEXT - 1), "max_tokens"),
        (lambda: with_options(stop_token_ids=[-1]), "stop_token_ids"),
        (lambda: with_options(stop=[""]), "stop"),
        (lambda: with_options(logit_bias={300: 1.0}), "logit_bias"),
        (lambda: with_options(logprobs=21), "logprobs"),
    ],
)
async def test_the_same_rules_as_over_http(
    connect: Connect, build: Callable[[], pb.GenerateRequest], param: str
) -> None:
    async with connect(build_generator(scheduler := echo_scheduler(b"x"))) as channel:
        error = await failure(channel, build())
        assert (error.codes.grpc_status, error.param) == ("INVALID_ARGUMENT", param)
        assert scheduler.streams == []
        async for _ in generate(channel, pb.GenerateRequest(token_ids=IDS)):
            pass


async def test_errors_arrive_whole(connect: Connect) -> None:
    refuse = PdserveError(ErrorReason.QUEUE_FULL, "full", retry_after_s=1.5)
    async with connect(build_generator(ScriptedScheduler(lambda _: Script([]), refuse=refuse))) as channel:
        error = await failure(channel, pb.GenerateRequest(text="a"))
    assert (error.reason, error.message, error.retry_after_s) == (ErrorReason.QUEUE_FULL, "full", 1.5)


async def test_requests_have_the_size_limit_of_http_bodies(connect: Connect) -> None:
    async with connect(build_generator(scheduler := echo_scheduler(b"x"), max_body_bytes=1000)) as channel:
        error = await failure(channel, pb.GenerateRequest(text="a" * 1001))
    assert error.reason is ErrorReason.PAYLOAD_TOO_LARGE
    assert scheduler.streams == []


async def test_a_failure_in_mid_stream_follows_the_tokens(connect: Connect) -> None:
    lost = PdserveError(ErrorReason.WORKER_LOST, "lost")
    async with connect(build_generator(scheduler_of(b"a", error=lost))) as channel:
        call = generate(channel, pb.GenerateRequest(text="a"))
        assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["started", "delta"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert error_from_rpc(caught.value).reason is ErrorReason.WORKER_LOST


def waits_for_calls(task: "asyncio.Task[object]") -> bool:
    """The server's own task, there as long as it is."""
    return "request_registered_call" in repr(task)


async def until_cancelled(scheduler: ScriptedScheduler) -> None:
    for stream in scheduler.streams:
        await asyncio.wait_for(stream._cancelled.wait(), 10)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_cancels_ends_every_sequence_once(connect: Connect, n: int) -> None:
    generator = build_generator(scheduler := scheduler_of(*[b"x"] * 3, hang=True))
    async with connect(generator) as channel:
        before = asyncio.all_tasks()
        call = generate(channel, pb.GenerateRequest(text="a", n=n))
        for _ in range(4):
            await call.read()
        call.cancel()
        await until_cancelled(scheduler)
        handlers = {task for task in asyncio.all_tasks() - before if not waits_for_calls(task)}
        if handlers:
            _, alive = await asyncio.wait(handlers, timeout=10)
            assert not alive
    assert [stream.num_cancels for stream in scheduler.streams] == [1] * n


async def test_a_deadline_of_the_call_ends_the_sequence(connect: Connect) -> None:
    async with connect(build_generator(scheduler := scheduler_of(b"x", hang=True))) as channel:
        error = await failure(channel, pb.GenerateRequest(text="a"), timeout=0.5)
        assert error.reason is ErrorReason.DEADLINE_EXCEEDED
        await until_cancelled(scheduler)
    assert scheduler.num_cancels == 1


async def test_a_closed_channel_ends_the_sequence(connect: Connect) -> None:
    async with connect(build_generator(scheduler := scheduler_of(b"x", hang=True))) as channel:
        call = generate(channel, pb.GenerateRequest(text="a"))
        await call.read()
        await channel.close()
        await until_cancelled(scheduler)
    assert scheduler.num_cancels == 1


async def test_a_cancelled_error_from_within_reaches_the_client(connect: Connect) -> None:
    async with connect(build_generator(scheduler_of(b"x", error=asyncio.CancelledError()))) as channel:
        error = await failure(channel, pb.GenerateRequest(text="a"))
    assert error.reason is ErrorReason.INTERNAL


async def test_a_bug_is_an_internal_error_without_a_word_of_it(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(build_generator(scheduler_of(b"x", error=ValueError("the prompt was abc")))) as channel:  # type: ignore[arg-type]
        error = await failure(channel, pb.GenerateRequest(text="abc"))
    assert (error.reason, error.message) == (ErrorReason.INTERNAL, "internal error")
    assert "the prompt was abc" in caplog.text


@pytest.mark.parametrize(
    ("method", "raw"),
    [("Generate", b"\xff\xff"), ("Generate", b"\x12\x01\xff"), ("Generate", b"\x12\x7fcut"), ("ListModels", b"\xff")],
)
async def test_bytes_that_are_no_message_are_the_clients_fault(connect: Connect, method: str, raw: bytes) -> None:
    """Not UNKNOWN, which is what gRPC makes of it."""
    async with connect(build_generator(scheduler := echo_scheduler(b"x"))) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in channel.unary_stream(f"/pdserve.v1.Inference/{method}")(raw):
                pass
    error = error_from_rpc(caught.value)
    assert (error.reason, caught.value.code().name) == (ErrorReason.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert f"pdserve.v1.{method}Request" in error.message
    assert scheduler.streams == []


async def test_the_nearest_deadline_counts(connect: Connect) -> None:
    async with connect(build_generator(scheduler := echo_scheduler(b"x"))) as channel:
        for deadline_ms, timeout in ((1500, 20), (None, 20), (90_000, 20), (None, None)):
            async for _ in generate(channel, pb.GenerateRequest(text="a", deadline_ms=deadline_ms), timeout=timeout):
                pass
    lifetimes = [stream.request.deadline_s - stream.request.arrival_s for stream in scheduler.streams]
    assert lifetimes[0] == pytest.approx(1.5)
    assert all(1.5 < lifetime < 21 for lifetime in lifetimes[1:3])
    assert lifetimes[3] == pytest.approx(600.0)


async def test_keys_and_models(connect: Connect) -> None:
    generator = build_generator(scheduler := scheduler_of([EOS]), text_model(), api_keys={"k": "acme"})
    async with connect(generator) as channel:
        assert (await failure(channel, pb.GenerateRequest(text="a"))).reason is ErrorReason.UNAUTHENTICATED
        metadata = (("authorization", "Bearer k"),)
        async for _ in generate(channel, pb.GenerateRequest(text="a"), metadata=metadata):
            pass
        with pytest.raises(grpc.aio.AioRpcError):
            await InferenceStub(channel).ListModels(pb.ListModelsRequest())
        answer = await InferenceStub(channel).ListModels(pb.ListModelsRequest(), metadata=metadata)
    assert scheduler.streams[0].request.tenant == "acme"
    assert [(m.info.name, m.default_max_tokens, m.ready) for m in answer.models] == [("tiny", CONTEXT - 1, True)]
    observer = generator._observer
    assert isinstance(observer, RecordingObserver)
    assert [record.outcome for record in observer.records] == ["stop"]
