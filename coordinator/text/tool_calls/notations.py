"""The notations of tool calls that are read, and how to tell from a chat template which one it teaches."""

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.text.tool_calls.call_bodies import BareJson, CallBody, ListOrNamed, TaggedJson


@dataclass(frozen=True, slots=True)
class Notation:
    """`opening` stands before each body; with an empty one, bodies stand at the very start of the answer.

    A template teaches it that holds all of `signs` and none of `foreign_signs`. `special_tokens` are texts that some
    vocabularies have as special tokens. Ids of calls are `id_prefix` and `num_id_chars` letters and digits.
    """

    name: str
    opening: str
    make_body: Callable[[], CallBody]
    signs: tuple[str, ...]
    foreign_signs: tuple[str, ...] = ()
    special_tokens: tuple[str, ...] = ()
    id_prefix: str = "call_"
    num_id_chars: int = 24


HERMES = Notation(
    "hermes",
    "<tool_call>",
    TaggedJson,
    signs=("<tool_call>", "</tool_call>"),
    # Qwen3-Coder and GLM write XML between the same tags.
    foreign_signs=("<function=", "<arg_key>"),
    special_tokens=("<tool_call>", "</tool_call>"),
)
MISTRAL = Notation(
    "mistral",
    "[TOOL_CALLS]",
    ListOrNamed,
    signs=("[TOOL_CALLS]",),
    foreign_signs=("[CALL_ID]",),
    special_tokens=("[TOOL_CALLS]", "[ARGS]"),
    # Its templates refuse ids of any other form when they come back.
    id_prefix="",
    num_id_chars=9,
)
LLAMA3_JSON = Notation("llama3-json", "", BareJson, signs=("<|start_header_id|>", '"parameters"'))

NOTATIONS = (HERMES, MISTRAL, LLAMA3_JSON)


def find_notation(template_source: str) -> Notation | None:
    """The first notation that a template teaches."""
    for notation in NOTATIONS:
        taught = all(sign in template_source for sign in notation.signs)
        if taught and not any(sign in template_source for sign in notation.foreign_signs):
            return notation
    return None
