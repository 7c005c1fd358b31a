"""What the typed clients of the Inference service take and give. Knows no protobuf and opens no connection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.core.ids import SequenceId
from pdserve.core.model_info import ModelInfo
from pdserve.core.sampling import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's call of one of the request's tools. `arguments` is JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. A turn of role "tool" answers the call `tool_call_id`."""

    role: str
    content: str | None = None
    name: str = ""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""


Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or a conversation for the model's chat template."""


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """None takes the server's default. `deadline_s` counts from the server's receipt of the request.

    `logprobs` asks for each token's own logprob and those of the k best. What follows `cache_salt` belongs to
    conversations only: `tools` as OpenAI's API describes them, `tool_choice` "auto" or "none", `template_variables` for
    the chat template, `continue_final_message` to go on where the last message ends.
    """

    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    min_tokens: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int | None = None
    logprobs: int | None = None
    echo: bool = False
    deadline_s: float | None = None
    label: str = ""
    cache_salt: str = ""
    tools: Sequence[Mapping[str, object]] = ()
    tool_choice: str = ""
    parallel_tool_calls: bool | None = None
    template_variables: Mapping[str, object] = field(default_factory=dict[str, object])
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted and queued."""

    request_id: SequenceId
    num_prompt_tokens: int
    seed: int
    model: str
    system_fingerprint: str


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """With `echo`, the first event of each choice. `logprobs` are its tokens' from the second on, if asked for."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """Output tokens of one choice from `first_index` on, and the text that can be shown now; either may be empty.

    `logprobs`, if asked for, are in step with `token_ids`; each tool call comes whole, once.
    """

    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds per phase, as the coordinator saw them; TTFT = queue + reserve + prefill.

    The first token is sent from prefill, so exposed transfer is part of the first inter-token latency, never of TTFT.
    """

    queue_s: float
    reserve_s: float
    prefill_s: float
    exposed_transfer_s: float
    decode_s: float
    ttft_s: float
    prefill_worker: str
    decode_worker: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of one choice. One that ended with tool calls has finish reason STOP."""

    choice: int
    finish_reason: FinishReason
    usage: Usage
    timings: Timings


GenerateEvent = Started | PromptEcho | Delta | Finished


@dataclass(frozen=True, slots=True)
class ServedModel:
    info: ModelInfo
    default_max_tokens: int
    ready: bool
