"""The OpenAPI schemas of request fields. Values are checked elsewhere, by one validator for HTTP and gRPC."""

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import WithJsonSchema

from coordinator.generation.fields import MAX_IDS
from coordinator.generation.validation import MAX_STOP_CHARS, RANGES, SEED_LIMIT
from coordinator.text.chat_messages import MAX_MESSAGES, ROLES

Schema = dict[str, object]

TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
BOOLEAN: Schema = {"type": "boolean"}
TOKEN_ID: Schema = {"type": "integer", "minimum": 0}


def nullable(*schemas: Schema) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [*schemas, {"type": "null"}], "default": None})


def list_of(schema: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": schema, **bounds}


def record(required: Sequence[str], properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "required": list(required), "properties": dict(properties)}


def number(name: str) -> WithJsonSchema:
    """Of a sampling parameter in `RANGES`."""
    allowed = RANGES[name]
    low = "exclusiveMinimum" if allowed.low_open else "minimum"
    return nullable({"type": "number", low: allowed.low, "maximum": allowed.high})


def integer(low: int, high: int | None = None) -> WithJsonSchema:
    return nullable({"type": "integer", "minimum": low, **({} if high is None else {"maximum": high})})


_STOP = TEXT | {"minLength": 1, "maxLength": MAX_STOP_CHARS}
_BIAS: Schema = {"type": "number", "minimum": RANGES["logit_bias"].low, "maximum": RANGES["logit_bias"].high}
_NAMED = record(["name"], {"name": TEXT, "description": TEXT, "parameters": OBJECT})
_CALLED = record(["name"], {"name": TEXT, "arguments": TEXT})
_PART = record(["type", "text"], {"type": {"const": "text"}, "text": TEXT})

# To pydantic they may be anything.
Flag = Annotated[object, nullable(BOOLEAN)]
PositiveInteger = Annotated[object, integer(1)]
Seed = Annotated[object, integer(0, SEED_LIMIT - 1)]
Texts = Annotated[object, nullable(_STOP, list_of(_STOP))]
TokenIds = Annotated[object, nullable(list_of(TOKEN_ID, maxItems=MAX_IDS))]
Biases = Annotated[
    object,
    nullable(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": _BIAS,
            "maxProperties": MAX_IDS,
        }
    ),
]
PromptField = Annotated[
    object,
    WithJsonSchema({"anyOf": [TEXT, list_of(TEXT), list_of(TOKEN_ID), list_of(list_of(TOKEN_ID))]}),
]
Variables = Annotated[object, nullable(OBJECT)]
Tools = Annotated[
    object, nullable(list_of(record(["type", "function"], {"type": {"const": "function"}, "function": _NAMED})))
]
ToolChoice = Annotated[object, nullable({"enum": ["auto", "none"]})]
MESSAGES = list_of(
    record(
        ["role"],
        {
            "role": {"enum": list(ROLES)},
            "content": {"anyOf": [TEXT, list_of(_PART), {"type": "null"}]},
            "name": TEXT,
            "tool_call_id": TEXT,
            "tool_calls": list_of(
                record(["function"], {"id": TEXT, "type": {"const": "function"}, "function": _CALLED})
            ),
        },
    ),
    minItems=1,
    maxItems=MAX_MESSAGES,
)
Messages = Annotated[object, WithJsonSchema(MESSAGES)]
OptionalMessages = Annotated[object, nullable(MESSAGES)]
