"""What the runner needs of a model, and the loader of a model that is still empty."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.core.model_files import ModelConfig
from pdserve.engine.block_table import BlockTable

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInput:
    """The chunks of one step, B of them with N rows in all; chunk i's rows follow chunk i − 1's.

    `token_ids` and `positions` [N]. `query_lens[i]` rows end at position `context_lens[i]` − 1 of a sequence whose
    position p lies in block `block_tables[i].ids[p // block_size]`, slot `p % block_size`. `sample_rows`: those whose
    logits are wanted.
    """

    token_ids: Int32s
    positions: Int32s
    query_lens: Int32s
    context_lens: Int32s
    block_tables: Sequence[BlockTable]
    sample_rows: Int32s


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds spent in forward and logits since the model was made."""

    gemm_s: float
    attention_s: float
    other_s: float


class Model(Protocol):
    """Every row's results have the same bits whatever the other rows are."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def numerics_version(self) -> str:
        """Names the arithmetic: equal inputs give equal bits where this is equal, on one kind of machine."""
        ...

    @property
    def kv_inner_order(self) -> str:
        """See `KvLayout.inner_order`."""
        ...

    @property
    def weight_bytes(self) -> int:
        """What it holds once it is loaded: weights as it keeps them, tables included."""
        ...

    def workspace_bytes(self, num_rows: int, num_samples: int) -> int:
        """Upper bound of what it takes besides for a step of `num_rows` rows, and `num_samples` rows of logits."""
        ...

    def destinations(self) -> dict[str, Tensor]:
        """Hugging Face name → where the loader must write that tensor. Each is written exactly once."""
        ...

    def freeze(self) -> None:
        """All weights are in place: prepare for `forward`."""
        ...

    def forward(self, step: StepInput, kv_pool: Tensor) -> NDArray[np.float32]:
        """Write all rows' KV, keep their final hidden states until the next call, and give `logits(step.sample_rows)`:
        in one go, as starting threads or kernels anew costs time."""
        ...

    def logits(self, rows: Int32s) -> NDArray[np.float32]:
        """Of rows of the last forward: [len(rows), vocab_size] on the host, valid until the next call of either."""
        ...

    def profile(self) -> Profile | None:
        """None where nothing is measured."""
        ...
