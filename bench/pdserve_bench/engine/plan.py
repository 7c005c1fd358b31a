"""What `pdserve bench engine` measures: the cells, and the configurations that each need a process of their own."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

from pdserve.core.errors import ErrorReason, PdserveError

WARM_UP_STEPS = 3
"""Before the timed steps of a decode cell."""

Precision = Literal["bfloat16", "float32"]
PRECISIONS: tuple[Precision, ...] = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Configuration:
    """What is fixed for a process: the dtype of weights and KV, compute threads, the attention kernels' precision."""

    dtype: Precision
    num_threads: int
    attention: Precision = "float32"

    def __str__(self) -> str:
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        return f"{self.dtype}, {threads}, {self.attention} attention"


@dataclass(frozen=True, slots=True)
class Workload:
    """The cells measured in every configuration: `batches` × `contexts`, and `prompt_lens` × `chunks`.

    A decode cell is `num_steps` timed steps, a prefill cell `num_prefills` prompts. A measurement that others disturbed
    is taken up to `max_tries` times.
    """

    source: Path
    model_name: str
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    chunks: tuple[int, ...]
    block_size: int = 16
    num_steps: int = 20
    num_prefills: int = 3
    max_tries: int = 3
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence there will be."""
        return max((1, *(context + WARM_UP_STEPS + self.num_steps for context in self.contexts), *self.prompt_lens))

    def check(self, context_length: int) -> None:
        """Raises PdserveError (INVALID_ARGUMENT) if a sequence would be longer than the model's context."""
        if self.longest > context_length:
            message = f"sequences of {self.longest} tokens do not fit the model's context of {context_length}"
            raise PdserveError(ErrorReason.INVALID_ARGUMENT, message)


@dataclass(frozen=True, slots=True)
class Task:
    """One process's work, and the cores it is pinned to."""

    workload: Workload
    configuration: Configuration
    cores: tuple[int, ...]


def plan_tasks(
    workload: Workload,
    dtypes: tuple[Precision, ...],
    threads: tuple[int, ...],
    attentions: tuple[Precision, ...],
    cores: tuple[int, ...],
) -> list[Task]:
    """Every combination, on the first of `cores`.

    Raises:
        PdserveError: INVALID_ARGUMENT, there are fewer cores than threads asked for.
    """
    if max(threads) > len(cores):
        message = f"{max(threads)} threads were asked for, and this process may use {len(cores)} cores"
        raise PdserveError(ErrorReason.INVALID_ARGUMENT, message, param="threads")
    combinations = product(dtypes, threads, attentions)
    return [Task(workload, Configuration(*chosen), cores[: chosen[1]]) for chosen in combinations]
