"""What the runner needs of a model, and the loader of a model that is still empty."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdserve.core.model_files import ModelConfig
from pdserve_kernels.interface import PagedStep


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """One step's rows, padding included."""

    token_ids: Tensor
    positions: Tensor
    step: PagedStep


class Model(Protocol):
    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def destinations(self) -> dict[str, Tensor]:
        """Hugging Face name → where the loader must write that tensor. Each is written exactly once."""
        ...

    def freeze(self) -> None:
        """All weights are in place: prepare for `forward`."""
        ...

    def forward(self, rows: ForwardInput) -> Tensor:
        """Write all rows' KV and return their final hidden states, fp32 [N, hidden_size], for `logits`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [M, hidden_size] → fp32 logits [M, vocab_size]; M a multiple of the kernels' `row_multiple`."""
        ...
