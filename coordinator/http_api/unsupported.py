"""Fields that clients may know from elsewhere and that nothing here implements. Checks nothing else.

The rule: unknown fields are accepted and ignored, as OpenAI's clients expect; but one that would change the answer is
refused when it asks for something, and the refusal says what to do instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.core.errors import ErrorReason, PdserveError


@dataclass(frozen=True, slots=True)
class Refusal:
    """`neutral`: the values that ask for nothing, besides null. `instead` ends the sentence "… is not supported: "."""

    instead: str
    neutral: tuple[object, ...] = ()


_CONSTRAINED = "constrained decoding isn't built; describe the form in the prompt and check the answer"
_SAMPLES = "ask for n choices, and pick the best by their logprobs"
_TEXT_ONLY = "only text is generated"
_BIAS = "use logit_bias"

_COMMON = {
    "best_of": Refusal(_SAMPLES, (1,)),
    "use_beam_search": Refusal(_SAMPLES, (False,)),
    "response_format": Refusal(_CONSTRAINED, ({"type": "text"},)),
    "structured_outputs": Refusal(_CONSTRAINED),
    "guided_json": Refusal(_CONSTRAINED),
    "guided_regex": Refusal(_CONSTRAINED),
    "guided_choice": Refusal(_CONSTRAINED),
    "guided_grammar": Refusal(_CONSTRAINED),
    "json_schema": Refusal(_CONSTRAINED),
    "regex": Refusal(_CONSTRAINED),
    "ebnf": Refusal(_CONSTRAINED),
    "guided_decoding_backend": Refusal(_CONSTRAINED),
    "guided_whitespace_pattern": Refusal(_CONSTRAINED),
    "structural_tag": Refusal(_CONSTRAINED),
    "prompt_embeds": Refusal("send text or token ids"),
    "length_penalty": Refusal(_SAMPLES, (1, 1.0)),
    "typical_p": Refusal("use min_p or top_p", (1, 1.0)),
    "prompt_logprobs": Refusal("use echo with logprobs on /v1/completions"),
    "truncate_prompt_tokens": Refusal("shorten the prompt with the help of /tokenize"),
    "include_stop_str_in_output": Refusal("append the stop string yourself", (False,)),
    "skip_special_tokens": Refusal("special tokens are never part of the text; ask for logprobs to see them", (True,)),
    "return_token_ids": Refusal("use /tokenize, or the gRPC API, which streams ids", (False,)),
    "return_tokens_as_token_ids": Refusal("use the gRPC API, which streams ids", (False,)),
    "allowed_token_ids": Refusal(_BIAS, ([],)),
    "bad_words": Refusal(_BIAS, ([],)),
    "logits_processors": Refusal(_BIAS, ([],)),
}

COMPLETION_FIELDS: Mapping[str, Refusal] = {
    **_COMMON,
    "suffix": Refusal("write the model's own fill-in-the-middle tokens into the prompt", ("",)),
    "top_logprobs": Refusal("give their number as logprobs", (0,)),
    "max_completion_tokens": Refusal("use max_tokens"),
    "tools": Refusal("use /v1/chat/completions", ([],)),
    "tool_choice": Refusal("use /v1/chat/completions", ("none", "auto")),
}
CHAT_FIELDS: Mapping[str, Refusal] = {
    **_COMMON,
    "echo": Refusal("use /v1/completions", (False,)),
    "functions": Refusal("use tools", ([],)),
    "function_call": Refusal("use tools and tool_choice", ("none", "auto")),
    "chat_template": Refusal("send a prompt that you rendered to /v1/completions"),
    "documents": Refusal("put them into a message", ([],)),
    "modalities": Refusal(_TEXT_ONLY, (["text"],)),
    "audio": Refusal(_TEXT_ONLY),
    "prediction": Refusal("leave it out; the answer is the same"),
    "web_search_options": Refusal("search yourself and put what you found into a message"),
}


def refuse_unsupported(extra: Mapping[str, object], fields: Mapping[str, Refusal]) -> None:
    """Raises PdserveError (UNSUPPORTED) for the first of `fields` that asks for something."""
    for name, refusal in fields.items():
        if extra.get(name) not in (None, *refusal.neutral):
            raise PdserveError(ErrorReason.UNSUPPORTED, f"{name} is not supported: {refusal.instead}", param=name)
