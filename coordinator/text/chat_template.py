"""Chat messages to a prompt, through the model's own Jinja template. Knows nothing of token ids."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.core.errors import ErrorReason, PdserveError, invalid

MAX_PROMPT_CHARS = 16 * 1024 * 1024
"""Of a rendered prompt; no context holds as much, and a template that repeats itself ends here."""


class ChatTemplate:
    """A compiled template, run in a sandbox. `variables` are the names it reads.

    Raises:
        PdserveError: UNSUPPORTED when the template is no valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source, globals=_FUNCTIONS)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except TemplateSyntaxError as error:
            message = f"the model's chat template, line {error.lineno}: {error.message}"
            raise PdserveError(ErrorReason.UNSUPPORTED, message) from error
        self.source = source
        # Templates ask `tools is not none`, which an undefined name is not.
        self._context: Mapping[str, object] = {"tools": None, "documents": None, **special_tokens}

    @property
    def own_names(self) -> frozenset[str]:
        """Names that mean something already, and cannot be variables of a request."""
        return frozenset({*self._context, "messages", "add_generation_prompt", "continue_final_message", *_FUNCTIONS})

    def render(self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object] | None = None) -> str:
        """The prompt, by default up to where the assistant's answer begins.

        Args:
            variables: names that the template reads: `tools`, `add_generation_prompt`, or its own.

        Raises:
            PdserveError: INVALID_ARGUMENT when the template refuses the messages, with its own message.
        """
        context = {"add_generation_prompt": True, **self._context, **(variables or {}), "messages": messages}
        try:
            return _joined(self._template.generate(context))
        except TemplateError as error:
            raise invalid(f"the model's chat template refused the messages: {error.message}", "messages") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            kind = type(error).__name__
            raise invalid(f"the model's chat template failed on these messages ({kind})", "messages") from error


def _joined(pieces: Iterator[str]) -> str:
    taken: list[str] = []
    num_chars = 0
    for piece in pieces:
        taken.append(piece)
        num_chars += len(piece)
        if num_chars > MAX_PROMPT_CHARS:
            raise invalid(
                f"the model's chat template makes more than {MAX_PROMPT_CHARS} characters of them", "messages"
            )
    return "".join(taken)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As templates written for transformers call it. Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


_FUNCTIONS: dict[str, Callable[..., object]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
