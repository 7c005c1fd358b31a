"""Clients of the Inference service, for asyncio and for threads. They retry nothing."""

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from types import TracebackType
from typing import Self

import grpc

from pdserve.client.channels import aio_channel, sync_channel
from pdserve.client.completion import Completion, CompletionBuilder
from pdserve.client.errors import error_from_rpc
from pdserve.client.inference import GenerateEvent, GenerateOptions, Prompt, ServedModel
from pdserve.client.inference_wire import event_from_proto, generate_request, served_model_from_proto
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.inference_pb2_grpc import InferenceStub

_DEFAULTS = GenerateOptions()
_LIST_TIMEOUT_S = 10.0


def _metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


class AsyncClient:
    """For asyncio code; one connection to host:port, any number of requests. Close it, or use `async with`."""

    def __init__(self, address: str, api_key: str = "", credentials: grpc.ChannelCredentials | None = None) -> None:
        self._channel = aio_channel(address, credentials)
        self._stub = InferenceStub(self._channel)
        self._metadata = _metadata(api_key)

    async def generate(self, prompt: Prompt, options: GenerateOptions = _DEFAULTS) -> AsyncGenerator[GenerateEvent]:
        """One Started, then Deltas, and one Finished per choice. Leaving the loop early cancels the request once the
        iterator is closed (`contextlib.aclosing`).

        Raises:
            PdserveError: whatever the server refused or ended the request with.
        """
        call = self._stub.Generate(generate_request(prompt, options), metadata=self._metadata)
        try:
            async for message in call:
                if (event := event_from_proto(message)) is not None:
                    yield event
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        finally:
            call.cancel()

    async def complete(self, prompt: Prompt, options: GenerateOptions = _DEFAULTS) -> Completion:
        """The whole answer at once; raises as `generate`."""
        builder = CompletionBuilder(options.n or 1)
        async with aclosing(self.generate(prompt, options)) as events:
            async for event in events:
                builder.add(event)
        return builder.completion()

    async def list_models(self) -> list[ServedModel]:
        """What the server serves; raises PdserveError."""
        try:
            answer = await self._stub.ListModels(
                pb.ListModelsRequest(), metadata=self._metadata, timeout=_LIST_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        return [served_model_from_proto(model) for model in answer.models]

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Client:
    """For ordinary threads; see AsyncClient."""

    def __init__(self, address: str, api_key: str = "", credentials: grpc.ChannelCredentials | None = None) -> None:
        self._channel = sync_channel(address, credentials)
        self._stub = InferenceStub(self._channel)
        self._metadata = _metadata(api_key)

    def generate(self, prompt: Prompt, options: GenerateOptions = _DEFAULTS) -> Generator[GenerateEvent]:
        """As `AsyncClient.generate`."""
        call = self._stub.Generate(generate_request(prompt, options), metadata=self._metadata)
        try:
            for message in call:
                if (event := event_from_proto(message)) is not None:
                    yield event
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        finally:
            call.cancel()

    def complete(self, prompt: Prompt, options: GenerateOptions = _DEFAULTS) -> Completion:
        """As `AsyncClient.complete`."""
        builder = CompletionBuilder(options.n or 1)
        for event in self.generate(prompt, options):
            builder.add(event)
        return builder.completion()

    def list_models(self) -> list[ServedModel]:
        """As `AsyncClient.list_models`."""
        try:
            answer = self._stub.ListModels(pb.ListModelsRequest(), metadata=self._metadata, timeout=_LIST_TIMEOUT_S)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        return [served_model_from_proto(model) for model in answer.models]

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
