"""Chat messages to a prompt, through the model's own Jinja template. Knows nothing of token ids."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.core.errors import ErrorReason, PdserveError, invalid


class ChatTemplate:
    """A compiled template, run in a sandbox.

    Raises:
        PdserveError: UNSUPPORTED when the template is no valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source, globals=_FUNCTIONS)
        except TemplateSyntaxError as error:
            message = f"the model's chat template, line {error.lineno}: {error.message}"
            raise PdserveError(ErrorReason.UNSUPPORTED, message) from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The prompt up to where the assistant's answer begins.

        Raises:
            PdserveError: INVALID_ARGUMENT when the template refuses the messages, with its own message.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except TemplateError as error:
            raise invalid(f"the model's chat template refused the messages: {error.message}", "messages") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            kind = type(error).__name__
            raise invalid(f"the model's chat template failed on these messages ({kind})", "messages") from error


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


def _to_json(value: object, indent: int | None = None) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


_FUNCTIONS: dict[str, Callable[..., object]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
