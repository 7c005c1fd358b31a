"""The Inference service's calls, from bytes to a status: who asks, how it ends. Decides nothing about generation."""

import asyncio
import logging
from typing import TYPE_CHECKING, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from coordinator.auth import Authenticator
from coordinator.generation.generator import Generator
from coordinator.generation.served_model import TextModel
from coordinator.grpc_api.requests import generation_input
from coordinator.grpc_api.responses import event_to_proto, started_to_proto
from pdserve.client.errors import abort_with
from pdserve.client.wire import model_info_to_proto
from pdserve.core.errors import ErrorReason, PdserveError, invalid
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ListContext = grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse]

INFERENCE = pb.DESCRIPTOR.services_by_name["Inference"].full_name

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Register with `add_inference_service`."""

    def __init__(self, generator: Generator, authenticator: Authenticator) -> None:
        self._generator = generator
        self._authenticator = authenticator

    # A coroutine that writes, not an async generator: its `finally` blocks run when the call is cancelled.
    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: "Context"
    ) -> None:
        try:
            await self._generate(request, context)
        except PdserveError as error:
            await abort_with(context, error)
        except asyncio.CancelledError:
            await _end_cancelled(context)
        except Exception:
            logger.exception("Generate failed")
            await abort_with(context, PdserveError(ErrorReason.INTERNAL, "internal error"))

    async def ListModels(self, request: pb.ListModelsRequest, context: "ListContext") -> pb.ListModelsResponse:
        try:
            self._authenticator.authenticate(_authorization(context))
        except PdserveError as error:
            await abort_with(context, error)
        return pb.ListModelsResponse(models=[self._served(model) for model in self._generator.models])

    async def _generate(self, request: pb.GenerateRequest, context: "Context") -> None:
        arrival_s = self._generator.clock()
        caller = self._authenticator.authenticate(_authorization(context))
        _check_size(request, self._generator.settings.max_body_bytes)
        wanted = generation_input(request, caller, arrival_s, context.time_remaining())
        async with self._generator.generate(wanted) as generation:
            await context.write(started_to_proto(generation))
            async for event in generation:
                await context.write(event_to_proto(event))

    def _served(self, model: TextModel) -> pb.ServedModel:
        default = min(self._generator.settings.default_max_tokens, model.info.context_length - 1)
        ready = self._generator.is_ready(model)
        return pb.ServedModel(info=model_info_to_proto(model.info), default_max_tokens=default, ready=ready)


def add_inference_service(service: InferenceService, server: grpc.aio.Server) -> None:
    """What the generated `add_InferenceServicer_to_server` does, but bytes that are no message are the client's fault:
    gRPC's own deserialiser would end the call as UNKNOWN.
    """

    async def generate(raw: bytes, context: "Context") -> None:
        await service.Generate(await _parsed(pb.GenerateRequest, raw, context), context)

    async def list_models(raw: bytes, context: "ListContext") -> pb.ListModelsResponse:
        return await service.ListModels(await _parsed(pb.ListModelsRequest, raw, context), context)

    handlers = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            generate, request_deserializer=bytes, response_serializer=pb.GenerateResponse.SerializeToString
        ),
        "ListModels": grpc.unary_unary_rpc_method_handler(
            list_models, request_deserializer=bytes, response_serializer=pb.ListModelsResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE, handlers),))
    server.add_registered_method_handlers(INFERENCE, handlers)


async def _parsed(kind: type[M], raw: bytes, context: "Context | ListContext") -> M:
    try:
        return kind.FromString(raw)
    except DecodeError:
        await abort_with(context, invalid(f"the request is no {kind.DESCRIPTOR.full_name} message", ""))


def _check_size(request: pb.GenerateRequest, max_bytes: int) -> None:
    """The bound that HTTP bodies have: the channel's own is for workers too, and larger."""
    if request.ByteSize() > max_bytes:
        raise PdserveError(ErrorReason.PAYLOAD_TOO_LARGE, f"the request is larger than {max_bytes} bytes")


def _authorization(context: "Context | ListContext") -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str):
            return value
    return None


async def _end_cancelled(context: "Context") -> NoReturn:
    """A cancelled call ends as such; a CancelledError from within would leave its client without any status."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    await abort_with(context, PdserveError(ErrorReason.INTERNAL, "the request was cancelled inside the server"))
