"""A client's request before it is checked, the same whichever API it came through. Decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """`add_special_tokens`: with what the model expects around plain text, such as a BOS."""

    text: str
    param: str = "prompt"
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """`token_ids` as the client sent them; `param` names the list in error messages."""

    token_ids: Sequence[object]
    param: str = "prompt"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """OpenAI's messages and tools, still as the client sent them; `template_variables` go to the template.

    The template writes the special tokens itself, hence `add_special_tokens`.
    """

    messages: Sequence[object]
    tools: object = None
    tool_choice: object = None
    parallel_tool_calls: object = None
    template_variables: object = None
    add_generation_prompt: object = None
    continue_final_message: object = None
    param: str = "messages"
    add_special_tokens: bool = False


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """Sampling fields as the client sent them; None takes the default. Unchecked, hence `object`."""

    max_tokens: object = None
    max_tokens_param: str = "max_tokens"
    temperature: object = None
    top_k: object = None
    top_p: object = None
    min_p: object = None
    presence_penalty: object = None
    frequency_penalty: object = None
    repetition_penalty: object = None
    logit_bias: object = None
    min_tokens: object = None
    seed: object = None
    stop_token_ids: object = None
    ignore_eos: object = None
    stop: object = None
    logprobs: object = None


@dataclass(frozen=True, slots=True)
class GenerationInput:
    """`n` choices of each prompt; choices are numbered prompt by prompt. `arrival_s` reads `time.monotonic`."""

    prompts: tuple[Prompt, ...]
    arrival_s: float
    model: str = ""
    sampling: SamplingInput = field(default_factory=SamplingInput)
    n: object = None
    echo: object = None
    timeout_s: float | None = None
    tenant: str = "default"
    request_class: str = ""
    adapter: str = ""
    cache_salt: str = ""
    label: str = ""
