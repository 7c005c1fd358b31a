"""Typed clients of a pdserve server's gRPC API.

with Client("127.0.0.1:50051") as client:
    print(client.complete("Once upon a time", GenerateOptions(max_tokens=20)).text)
"""

from pdserve.client.client import AsyncClient, Client
from pdserve.client.completion import Choice, Completion
from pdserve.client.inference import (
    Delta,
    Finished,
    GenerateEvent,
    GenerateOptions,
    Message,
    Prompt,
    PromptEcho,
    ServedModel,
    Started,
    Timings,
    ToolCall,
    Usage,
)
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.sampling import FinishReason, TokenLogprobs

__all__ = [
    "AsyncClient",
    "Choice",
    "Client",
    "Completion",
    "Delta",
    "ErrorReason",
    "FinishReason",
    "Finished",
    "GenerateEvent",
    "GenerateOptions",
    "Message",
    "PdserveError",
    "Prompt",
    "PromptEcho",
    "ServedModel",
    "Started",
    "Timings",
    "TokenLogprobs",
    "ToolCall",
    "Usage",
]
