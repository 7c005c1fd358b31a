"""What clients POST to /v1/completions, and what all bodies share, to the neutral GenerationInput.

Checks shapes only, never values. Unknown fields: see `unsupported`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, cast

from pydantic import BaseModel, ConfigDict, StrictBool, StrictStr

from coordinator.generation.inputs import GenerationInput, Prompt, SamplingInput, TextPrompt, TokenPrompt
from coordinator.http_api.edge import Edge
from coordinator.http_api.field_schemas import (
    Biases,
    Flag,
    PositiveInteger,
    PromptField,
    Seed,
    Texts,
    TokenIds,
    integer,
    number,
)
from coordinator.http_api.unsupported import COMPLETION_FIELDS, Refusal, refuse_unsupported
from coordinator.text.prompts import clean_text
from pdserve.core.errors import invalid
from pdserve.core.sampling import MAX_LOGPROBS

MAX_PROMPTS = 1024
"""Beyond any max_choices; keeps a huge list from being taken apart before it is refused."""


class StreamOptions(BaseModel):
    """`continuous_usage_stats`, vLLM's: usage so far in every chunk; without `include_usage` it does nothing."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None

    @property
    def usage_in_every_chunk(self) -> bool:
        return bool(self.include_usage and self.continuous_usage_stats)


class GenerationBody(BaseModel):
    """Fields of both endpoints. Ranges and defaults: docs/api.md."""

    model_config = ConfigDict(frozen=True, extra="allow")

    model: StrictStr | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: PositiveInteger = None
    max_tokens: PositiveInteger = None
    temperature: Annotated[object, number("temperature")] = None
    top_p: Annotated[object, number("top_p")] = None
    top_k: Annotated[object, integer(-1)] = None
    min_p: Annotated[object, number("min_p")] = None
    presence_penalty: Annotated[object, number("presence_penalty")] = None
    frequency_penalty: Annotated[object, number("frequency_penalty")] = None
    repetition_penalty: Annotated[object, number("repetition_penalty")] = None
    logit_bias: Biases = None
    min_tokens: Annotated[object, integer(0)] = None
    seed: Seed = None
    stop: Texts = None
    stop_token_ids: TokenIds = None
    ignore_eos: Flag = None
    cache_salt: StrictStr | None = None
    add_special_tokens: StrictBool | None = None

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


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: PromptField
    echo: Flag = None
    logprobs: Annotated[object, integer(0, MAX_LOGPROBS)] = None


def completion_input(body: CompletionBody, edge: Edge) -> GenerationInput:
    """Raises PdserveError if `prompt` has none of its shapes."""
    sampling = replace(body.sampling(), logprobs=None if body.logprobs is False else body.logprobs)
    wanted = generation_input(body, edge, _prompts(body), sampling, COMPLETION_FIELDS)
    return replace(wanted, echo=body.echo)


def generation_input(
    body: GenerationBody,
    edge: Edge,
    prompts: tuple[Prompt, ...],
    sampling: SamplingInput,
    unsupported: Mapping[str, Refusal],
) -> GenerationInput:
    """Raises PdserveError if the body asks for one of the `unsupported` fields."""
    refuse_unsupported(body.model_extra or {}, unsupported)
    return GenerationInput(
        prompts=prompts,
        arrival_s=edge.arrival_s,
        model=body.model or "",
        sampling=sampling,
        n=body.n,
        timeout_s=edge.timeout_s,
        tenant=edge.caller.tenant,
        cache_salt=clean_text(body.cache_salt or ""),
        label=edge.label,
    )


def _prompts(body: CompletionBody) -> tuple[Prompt, ...]:
    """A text, ids, or a list of either. An empty list counts as one empty prompt, refused as such later."""
    raw, add_special_tokens = body.prompt, body.add_special_tokens is not False
    if isinstance(raw, str):
        return (TextPrompt(raw, add_special_tokens=add_special_tokens),)
    if not isinstance(raw, list):
        raise invalid("prompt must be text, a list of token ids, or a list of either", "prompt")
    items = cast("Sequence[object]", raw)
    if len(items) > MAX_PROMPTS and not isinstance(items[0], int):
        raise invalid(f"prompt may hold at most {MAX_PROMPTS} prompts", "prompt")
    if items and isinstance(items[0], str):
        return tuple(_text(item, f"prompt[{i}]", add_special_tokens) for i, item in enumerate(items))
    if items and isinstance(items[0], list):
        return tuple(_ids(item, f"prompt[{i}]") for i, item in enumerate(items))
    return (TokenPrompt(items),)


def _text(item: object, param: str, add_special_tokens: bool) -> Prompt:
    if not isinstance(item, str):
        raise invalid(f"{param} must be text, as the first prompt is", param)
    return TextPrompt(item, param, add_special_tokens)


def _ids(item: object, param: str) -> Prompt:
    if not isinstance(item, list):
        raise invalid(f"{param} must be a list of token ids, as the first prompt is", param)
    return TokenPrompt(cast("list[object]", item), param)
