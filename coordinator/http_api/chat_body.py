"""What clients POST to /v1/chat/completions, to the neutral GenerationInput. Checks shapes only, never values."""

from dataclasses import replace
from typing import Annotated, cast

from pydantic import BaseModel, ConfigDict

from coordinator.generation import fields
from coordinator.generation.inputs import ChatPrompt, GenerationInput
from coordinator.http_api.bodies import GenerationBody, generation_input
from coordinator.http_api.edge import Edge
from coordinator.http_api.field_schemas import Flag, Messages, PositiveInteger, ToolChoice, Tools, Variables, integer
from coordinator.http_api.unsupported import CHAT_FIELDS
from pdserve.core.errors import invalid
from pdserve.core.sampling import MAX_LOGPROBS


class PromptOptions(BaseModel):
    """What decides, besides the messages, how a chat is rendered."""

    model_config = ConfigDict(frozen=True, extra="allow")

    tools: Tools = None
    tool_choice: ToolChoice = None
    chat_template_kwargs: Variables = None
    add_generation_prompt: Flag = None
    continue_final_message: Flag = None

    def chat_prompt(self, messages: object, parallel_tool_calls: object = None) -> ChatPrompt:
        """Raises PdserveError if `messages` is no list."""
        if not isinstance(messages, list):
            raise invalid("messages must be a list", "messages")
        return ChatPrompt(
            cast("list[object]", messages),
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            template_variables=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


class ChatBody(PromptOptions, GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: PositiveInteger = None
    logprobs: Flag = None
    top_logprobs: Annotated[object, integer(0, MAX_LOGPROBS)] = None
    parallel_tool_calls: Flag = None


def chat_input(body: ChatBody, edge: Edge) -> GenerationInput:
    """Raises PdserveError if `messages` is no list, or fields contradict each other."""
    prompt = body.chat_prompt(body.messages, body.parallel_tool_calls)
    prompt = replace(prompt, add_special_tokens=body.add_special_tokens is True)
    limit, param = _max_tokens(body)
    sampling = replace(body.sampling(), max_tokens=limit, max_tokens_param=param, logprobs=_num_logprobs(body))
    return generation_input(body, edge, (prompt,), sampling, CHAT_FIELDS)


def _max_tokens(body: ChatBody) -> tuple[object, str]:
    """The limit and the name it was given by: `max_tokens` is the older one."""
    if body.max_completion_tokens is None:
        return body.max_tokens, "max_tokens"
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise invalid("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")
    return body.max_completion_tokens, "max_completion_tokens"


def _num_logprobs(body: ChatBody) -> int | None:
    wanted = fields.boolean(body.logprobs, "logprobs")
    num_top = fields.integer(body.top_logprobs, 0, MAX_LOGPROBS, "top_logprobs") or 0
    if num_top and not wanted:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    return num_top if wanted else None
