"""Response objects that both endpoints share, and those of models: their fields and nothing else."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """One JSON object sent to a client."""

    model_config = ConfigDict(frozen=True)

    def to_json(self) -> str:
        """Only what was set: OpenAI's chunks leave out more than they hold."""
        return self.model_dump_json(exclude_unset=True)


class PromptTokensDetails(Answer):
    cached_tokens: int


class UsageAnswer(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ModelAnswer(Answer):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pdserve"
    max_model_len: int
    context_length: int
    default_max_tokens: int
    ready: bool


class ModelListAnswer(Answer):
    object: Literal["list"] = "list"
    data: list[ModelAnswer]
