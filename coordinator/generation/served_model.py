"""The text side of each served model, by name: tokenizer, chat template, limits. Knows nothing of workers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from coordinator.text.chat_template import ChatTemplate
from pdserve.core.errors import ErrorReason, PdserveError, invalid
from pdserve.core.model_files import ModelFiles
from pdserve.core.model_info import ModelInfo
from pdserve.core.tokenizer import TextTokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class TextModel:
    """A served model. `created_s` is seconds since the epoch, for `/v1/models`."""

    info: ModelInfo
    tokenizer: TextTokenizer
    chat_template: ChatTemplate | None
    created_s: int = 0

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.info.eos_token_ids)


def load_text_model(info: ModelInfo, files: ModelFiles, created_s: int = 0) -> TextModel:
    """Read tokenizer and chat template.

    Raises:
        PdserveError: UNSUPPORTED or INVALID_ARGUMENT, naming what in the files is at fault.
    """
    tokenizer = load_tokenizer(files)
    source = tokenizer.chat_template
    template = None if source is None else ChatTemplate(source, tokenizer.special_tokens)
    return TextModel(info, tokenizer, template, created_s)


class ServedModels:
    """Models by the name that clients ask for."""

    def __init__(self, models: Iterable[TextModel]) -> None:
        self._models = {model.info.name: model for model in models}

    def __iter__(self) -> Iterator[TextModel]:
        return iter(self._models.values())

    def get(self, name: str) -> TextModel:
        """The model called `name`; an empty name means the only one there is.

        Raises:
            PdserveError: MODEL_NOT_FOUND; INVALID_ARGUMENT for an empty name where there are several.
        """
        if not name and len(self._models) == 1:
            return next(iter(self._models.values()))
        served = ", ".join(sorted(self._models))
        if not name:
            raise invalid(f"model must name one of those served: {served}", "model")
        if name not in self._models:
            raise PdserveError(
                ErrorReason.MODEL_NOT_FOUND, f"no model {name[:200]!r} is served here (served: {served})", param="model"
            )
        return self._models[name]
