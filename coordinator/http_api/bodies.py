"""What clients POST, as OpenAI's API names it, to the neutral GenerationInput. Checks shapes only, never values.

Unknown fields are accepted and ignored. Fields that are known but not implemented are refused when they ask for
something: see `_UNSUPPORTED`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, cast

from pydantic import BaseModel, ConfigDict, StrictBool, StrictStr, WithJsonSchema

from coordinator.generation.inputs import ChatPrompt, GenerationInput, Prompt, SamplingInput, TextPrompt, TokenPrompt
from coordinator.http_api.edge import Edge
from coordinator.text.prompts import clean_text
from pdserve.core.errors import invalid

MAX_PROMPTS = 1024
"""Beyond any max_choices; keeps a huge list from being taken apart before it is refused."""

# By name: the values that ask for nothing. null always does.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "use_beam_search": (False,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
}


def _nullable(*schemas: dict[str, object]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [*schemas, {"type": "null"}], "default": None})


def _list_of(schema: dict[str, object]) -> dict[str, object]:
    return {"type": "array", "items": schema}


_TEXT: dict[str, object] = {"type": "string"}
_INTEGER: dict[str, object] = {"type": "integer"}
_NUMBER: dict[str, object] = {"type": "number"}

# Values are checked by coordinator.validation, which gRPC shares: to pydantic they may be anything.
Number = Annotated[object, _nullable(_NUMBER)]
Integer = Annotated[object, _nullable(_INTEGER)]
Flag = Annotated[object, _nullable({"type": "boolean"})]
TextOrTexts = Annotated[object, _nullable(_TEXT, _list_of(_TEXT))]
Integers = Annotated[object, _nullable(_list_of(_INTEGER))]
Biases = Annotated[object, _nullable({"type": "object", "additionalProperties": _NUMBER})]
PromptField = Annotated[
    object,
    WithJsonSchema({"anyOf": [_TEXT, _list_of(_TEXT), _list_of(_INTEGER), _list_of(_list_of(_INTEGER))]}),
]
MessageSchema = WithJsonSchema(
    _list_of(
        {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                "content": {"anyOf": [_TEXT, _list_of({"type": "object"}), {"type": "null"}]},
            },
        }
    )
)


class StreamOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    include_usage: StrictBool = False


class _GenerationBody(BaseModel):
    """Fields of both endpoints. Ranges and defaults: docs/api.md."""

    model_config = ConfigDict(frozen=True, extra="allow")

    model: StrictStr | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: Integer = None
    max_tokens: Integer = None
    temperature: Number = None
    top_p: Number = None
    top_k: Integer = None
    min_p: Number = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    repetition_penalty: Number = None
    logit_bias: Biases = None
    min_tokens: Integer = None
    seed: Integer = None
    stop: TextOrTexts = None
    stop_token_ids: Integers = None
    ignore_eos: Flag = None
    cache_salt: StrictStr | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> SamplingInput:
        return SamplingInput(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            min_tokens=self.min_tokens,
            seed=self.seed,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            stop=self.stop,
        )


class CompletionBody(_GenerationBody):
    """POST /v1/completions."""

    prompt: PromptField
    echo: Flag = None
    logprobs: Integer = None


class ChatBody(_GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[object, MessageSchema]
    max_completion_tokens: Integer = None
    logprobs: Flag = None


def completion_input(body: CompletionBody, edge: Edge) -> GenerationInput:
    """Raises PdserveError if `prompt` has none of its shapes."""
    sampling = replace(body.sampling(), logprobs=None if body.logprobs is False else body.logprobs)
    return _input(body, edge, _prompts(body.prompt), sampling, echo=body.echo)


def chat_input(body: ChatBody, edge: Edge) -> GenerationInput:
    """Raises PdserveError if `messages` is no list, or the two names of `max_tokens` disagree."""
    if not isinstance(body.messages, list):
        raise invalid("messages must be a list", "messages")
    limit, param = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        if limit is not None and limit != body.max_completion_tokens:
            raise invalid("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")
        limit, param = body.max_completion_tokens, "max_completion_tokens"
    if body.logprobs is not None and not isinstance(body.logprobs, bool):
        raise invalid("logprobs must be true or false", "logprobs")
    logprobs = 0 if body.logprobs else None
    sampling = replace(body.sampling(), max_tokens=limit, max_tokens_param=param, logprobs=logprobs)
    return _input(body, edge, (ChatPrompt(cast("list[object]", body.messages)),), sampling, echo=None)


def _input(
    body: _GenerationBody, edge: Edge, prompts: tuple[Prompt, ...], sampling: SamplingInput, echo: object
) -> GenerationInput:
    extra = body.model_extra or {}
    asked = (name for name, neutral in _UNSUPPORTED.items() if extra.get(name) not in (None, *neutral))
    return GenerationInput(
        prompts=prompts,
        arrival_s=edge.arrival_s,
        model=body.model or "",
        sampling=sampling,
        n=body.n,
        echo=echo,
        timeout_s=edge.timeout_s,
        tenant=edge.caller.tenant,
        cache_salt=clean_text(body.cache_salt or ""),
        label=edge.label,
        unsupported=tuple(asked),
    )


def _prompts(raw: object) -> tuple[Prompt, ...]:
    """A text, ids, or a list of either. An empty list counts as one empty prompt, refused as such later."""
    if isinstance(raw, str):
        return (TextPrompt(raw),)
    if not isinstance(raw, list):
        raise invalid("prompt must be text, a list of token ids, or a list of either", "prompt")
    items = cast("Sequence[object]", raw)
    if len(items) > MAX_PROMPTS and not isinstance(items[0], int):
        raise invalid(f"prompt may hold at most {MAX_PROMPTS} prompts", "prompt")
    if items and isinstance(items[0], str):
        return tuple(_text(item, f"prompt[{i}]") for i, item in enumerate(items))
    if items and isinstance(items[0], list):
        return tuple(_ids(item, f"prompt[{i}]") for i, item in enumerate(items))
    return (TokenPrompt(items),)


def _text(item: object, param: str) -> Prompt:
    if not isinstance(item, str):
        raise invalid(f"{param} must be text, as the first prompt is", param)
    return TextPrompt(item, param)


def _ids(item: object, param: str) -> Prompt:
    if not isinstance(item, list):
        raise invalid(f"{param} must be a list of token ids, as the first prompt is", param)
    return TokenPrompt(cast("list[object]", item), param)
