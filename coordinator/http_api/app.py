"""The routes. Each turns a body into a GenerationInput and an answer into a response; everything else lies below."""

import time
from typing import Annotated

from fastapi import Body, Depends, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from coordinator.auth import Authenticator
from coordinator.generation.generation import Generation
from coordinator.generation.generator import Generator
from coordinator.generation.inputs import GenerationInput
from coordinator.generation.served_model import TextModel
from coordinator.http_api import openapi
from coordinator.http_api.answers import ModelAnswer, ModelListAnswer
from coordinator.http_api.bodies import CompletionBody, GenerationBody, StreamOptions, completion_input
from coordinator.http_api.chat_answers import ChatAnswer, ChatChunk
from coordinator.http_api.chat_body import ChatBody, chat_input
from coordinator.http_api.chat_format import ChatFormat
from coordinator.http_api.completion_answers import CompletionAnswer
from coordinator.http_api.completion_format import CompletionFormat
from coordinator.http_api.edge import Edge, EdgeMiddleware, edge_of
from coordinator.http_api.errors import add_error_handlers, json_response
from coordinator.http_api.responses import ClientGone, EventStream, MakeFormat, until_disconnect, whole_answer
from coordinator.http_api.tokenize import (
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
    detokenize,
    tokenize,
)

OfRequest = Annotated[Edge, Depends(edge_of)]


def build_http_app(generator: Generator, authenticator: Authenticator, registry: CollectorRegistry) -> FastAPI:
    """The whole HTTP side of a coordinator. `registry` is what GET /metrics shows."""
    app = FastAPI(
        title="pdserve",
        description="LLM serving with prefill and decode apart",
        redirect_slashes=False,
        responses=openapi.errors(openapi.EVERYWHERE),
    )
    app.add_middleware(EdgeMiddleware, authenticator=authenticator, settings=generator.settings, clock=generator.clock)
    add_error_handlers(app)
    _add_generation_routes(app, generator)
    _add_text_routes(app, generator)
    _add_model_routes(app, generator)
    _add_operations_routes(app, generator, registry)
    openapi.add_document(app)
    return app


def _add_generation_routes(app: FastAPI, generator: Generator) -> None:
    errors = openapi.errors(openapi.GENERATION)

    @app.post(
        "/v1/completions",
        response_model=CompletionAnswer,
        responses=errors | openapi.event_stream(CompletionAnswer),
    )
    async def completions(  # pyright: ignore[reportUnusedFunction]
        body: Annotated[CompletionBody, Body()], request: Request, edge: OfRequest
    ) -> Response:
        """Continue a prompt: text or token ids."""
        wanted = completion_input(body, edge)
        return await _answer(generator, request, wanted, _completion_format, body)

    @app.post("/v1/chat/completions", response_model=ChatAnswer, responses=errors | openapi.event_stream(ChatChunk))
    async def chat_completions(  # pyright: ignore[reportUnusedFunction]
        body: Annotated[ChatBody, Body()], request: Request, edge: OfRequest
    ) -> Response:
        """Answer a conversation, rendered by the model's own chat template."""
        return await _answer(generator, request, chat_input(body, edge), _chat_format, body)


def _add_text_routes(app: FastAPI, generator: Generator) -> None:
    errors = openapi.errors(openapi.TEXT_WORK)

    @app.post("/tokenize", response_model=TokenizeAnswer, responses=errors)
    async def tokenize_route(  # pyright: ignore[reportUnusedFunction]
        body: Annotated[TokenizeBody, Body()],
    ) -> Response:
        """The token ids of a prompt or of a rendered conversation."""
        return Response(await tokenize(generator, body), media_type="application/json")

    @app.post("/detokenize", response_model=DetokenizeAnswer, responses=errors)
    async def detokenize_route(  # pyright: ignore[reportUnusedFunction]
        body: Annotated[DetokenizeBody, Body()],
    ) -> Response:
        """The text of token ids, special tokens included."""
        return Response(await detokenize(generator, body), media_type="application/json")


def _add_model_routes(app: FastAPI, generator: Generator) -> None:
    errors = openapi.errors(openapi.MODELS)

    def describe(model: TextModel) -> ModelAnswer:
        context = model.info.context_length
        return ModelAnswer(
            id=model.info.name,
            created=model.created_s,
            max_model_len=context,
            context_length=context,
            default_max_tokens=min(generator.settings.default_max_tokens, context - 1),
            ready=generator.is_ready(model),
        )

    @app.get("/v1/models", responses=errors)
    async def models() -> ModelListAnswer:  # pyright: ignore[reportUnusedFunction]
        """What is served, with context length and the max_tokens taken where a request names none."""
        return ModelListAnswer(data=[describe(model) for model in generator.models])

    @app.get("/v1/models/{name:path}", responses=errors)
    async def model(name: str) -> ModelAnswer:  # pyright: ignore[reportUnusedFunction]
        """One served model."""
        return describe(generator.models.get(name))


def _add_operations_routes(app: FastAPI, generator: Generator, registry: CollectorRegistry) -> None:
    unready: openapi.Responses = {503: {"model": openapi.HealthAnswer, "description": "Not ready, and why"}}

    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_model=openapi.HealthAnswer, responses=unready)
    async def health() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Ready for requests: 200, or 503 with the reason."""
        reason = generator.not_ready_reason()
        if reason is None:
            return json_response({"status": "ok"})
        return json_response({"status": "unavailable", "reason": reason}, status=503)

    @app.head("/livez", include_in_schema=False)
    @app.get("/livez", response_model=openapi.HealthAnswer)
    async def livez() -> Response:  # pyright: ignore[reportUnusedFunction]
        """The process is up."""
        return json_response({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Prometheus text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


async def _answer(
    generator: Generator, request: Request, wanted: GenerationInput, make_format: MakeFormat, body: GenerationBody
) -> Response:
    opening = generator.generate(wanted)
    if body.stream:
        return EventStream(opening, make_format, body.stream_options or StreamOptions(), generator.clock)
    try:
        content = await until_disconnect(request.receive, whole_answer(opening, make_format))
    except ClientGone:
        return Response(status_code=499)
    return Response(content, media_type="application/json")


def _completion_format(generation: Generation) -> CompletionFormat:
    return CompletionFormat(generation, int(time.time()))


def _chat_format(generation: Generation) -> ChatFormat:
    return ChatFormat(generation, int(time.time()))
