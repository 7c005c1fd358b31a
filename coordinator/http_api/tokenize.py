"""POST /tokenize and /detokenize: bodies, answers and the work, which the event loop does not do."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Annotated, cast

from pydantic import BaseModel, ConfigDict, StrictBool, StrictStr, WithJsonSchema

from coordinator.generation.generator import Generator
from coordinator.generation.inputs import Prompt, TextPrompt
from coordinator.generation.served_model import TextModel
from coordinator.http_api.answers import Answer
from coordinator.http_api.chat_body import PromptOptions
from coordinator.http_api.field_schemas import TEXT, TOKEN_ID, OptionalMessages, list_of, nullable
from coordinator.text.output_text import prompt_token_texts
from coordinator.text.prompts import check_token_ids, clean_text
from pdserve.core.errors import invalid
from pdserve.core.tokenizer import TextTokenizer


class TokenizeBody(PromptOptions):
    """POST /tokenize: `prompt`, or `messages` and what decides how they are rendered.

    `add_special_tokens` is true for a prompt and false for messages, as when they are answered.
    """

    model: StrictStr | None = None
    prompt: Annotated[object, nullable(TEXT)] = None
    messages: OptionalMessages = None
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool | None = None


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(frozen=True, extra="allow")

    model: StrictStr | None = None
    tokens: Annotated[object, WithJsonSchema(list_of(TOKEN_ID))]


class TokenizeAnswer(Answer):
    """`token_strs`, the tokens' texts one by one, only if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] = []  # noqa: RUF012


class DetokenizeAnswer(Answer):
    prompt: str


async def tokenize(generator: Generator, body: TokenizeBody) -> str:
    """The JSON of the answer. A prompt may be longer than the context.

    Raises:
        PdserveError: MODEL_NOT_FOUND, or as `Generator.encode`.
    """
    model = generator.models.get(clean_text(body.model or ""))
    (tokens,) = await generator.encode([_prompt(body)], model, must_fit=False)
    return await generator.text_work(len(tokens), _tokenize_answer(body, model, tokens))


async def detokenize(generator: Generator, body: DetokenizeBody) -> str:
    """The JSON of the answer: the text of all tokens, special ones included, without a character cut at the end.

    Raises:
        PdserveError: MODEL_NOT_FOUND; INVALID_ARGUMENT, naming the id at fault.
    """
    model = generator.models.get(clean_text(body.model or ""))
    if not isinstance(body.tokens, list):
        raise invalid("tokens must be a list of token ids", "tokens")
    tokens = cast("list[object]", body.tokens)

    def work() -> str:
        token_ids = check_token_ids(tokens, model.info.vocab_size, "tokens")
        return DetokenizeAnswer(prompt=_text(model.tokenizer, token_ids)).to_json()

    return await generator.text_work(len(tokens), work)


def _prompt(body: TokenizeBody) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give one of prompt and messages", "prompt")
    if body.messages is not None:
        return replace(body.chat_prompt(body.messages), add_special_tokens=body.add_special_tokens is True)
    if not isinstance(body.prompt, str):
        raise invalid("prompt must be text", "prompt")
    return TextPrompt(body.prompt, add_special_tokens=body.add_special_tokens is not False)


def _tokenize_answer(body: TokenizeBody, model: TextModel, tokens: list[int]) -> Callable[[], str]:
    def work() -> str:
        answer = TokenizeAnswer(count=len(tokens), max_model_len=model.info.context_length, tokens=tokens)
        if body.return_token_strs:
            answer = answer.model_copy(update={"token_strs": [model.tokenizer.token_text(i) for i in tokens]})
        return answer.to_json()

    return work


def _text(tokenizer: TextTokenizer, token_ids: list[int]) -> str:
    """Token by token, because the library's own `decode` would hold the interpreter's lock all the while."""
    text = ""
    for special, run in groupby(token_ids, key=tokenizer.special_token_text):
        ids = list(run)
        text += special * len(ids) if special else "".join(prompt_token_texts(tokenizer, ids))
    return text
