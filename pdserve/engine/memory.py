"""How a worker's memory is shared out: predicted before anything is allocated, shown beside what was then measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_info import KvLayout
from pdserve.core.reservation import blocks_for_tokens

MIN_LONGEST_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """`budget_bytes` is for all a worker holds, `headroom_fraction` of it kept free; `num_blocks` 0: what fits.

    A budget of 0 stands for a share of what is free at start; whoever plans fills it in.
    """

    budget_bytes: int = 0
    headroom_fraction: float = 0.1
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What is not KV, in bytes."""

    weights: int
    workspace: int
    transfer_buffers: int
    runtime: int

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.transfer_buffers + self.runtime


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Predicted bytes by purpose. With the headroom they stay within the budget, unless `num_blocks` was given."""

    budget_bytes: int
    needs: MemoryNeeds
    kv_cache: int
    headroom: int
    num_blocks: int
    block_size: int
    context_length: int

    @property
    def total(self) -> int:
        """All but the headroom."""
        return self.needs.total + self.kv_cache

    @property
    def num_longest_requests(self) -> float:
        """How many requests of the full context length the KV cache holds at once."""
        return self.num_blocks / blocks_for_tokens(self.context_length, self.block_size)

    @property
    def warning(self) -> str:
        """One line if fewer than four of the longest requests fit; else empty."""
        if self.num_longest_requests >= MIN_LONGEST_REQUESTS:
            return ""
        if self.num_longest_requests < 1:
            num_tokens = self.num_blocks * self.block_size
            return (
                f"KV memory holds {num_tokens} tokens; requests of more than {num_tokens} tokens (prompt + max_tokens) "
                "are refused. Raise worker.memory_budget_bytes / worker.num_blocks"
            )
        return (
            f"KV memory holds {self.num_longest_requests:.1f} requests of {self.context_length} tokens, fewer than "
            f"{MIN_LONGEST_REQUESTS}: long requests will queue for each other ({self.num_blocks} blocks of "
            f"{self.block_size} tokens)"
        )


def plan_memory(limits: MemoryLimits, needs: MemoryNeeds, layout: KvLayout, context_length: int) -> MemoryPlan:
    """Give KV all that the other needs and the headroom leave, in whole blocks.

    Raises:
        PdserveError: INVALID_ARGUMENT, not even one block fits; the message has the numbers.
    """
    headroom = int(limits.budget_bytes * limits.headroom_fraction)
    left = limits.budget_bytes - headroom - needs.total
    num_blocks = limits.num_blocks or left // layout.block_bytes
    if num_blocks < 1:
        raise PdserveError(
            ErrorReason.INVALID_ARGUMENT,
            f"a memory budget of {_mib(limits.budget_bytes)} leaves nothing for KV: {_mib(needs.total)} for weights, "
            f"workspace, buffers and runtime, {_mib(headroom)} headroom, and {layout.block_bytes} bytes a block; "
            f"memory_budget_bytes must be at least {_least_budget(limits, needs, layout)}",
            param="memory_budget_bytes",
        )
    return MemoryPlan(
        limits.budget_bytes,
        needs,
        num_blocks * layout.block_bytes,
        headroom,
        num_blocks,
        layout.block_size,
        context_length,
    )


def _least_budget(limits: MemoryLimits, needs: MemoryNeeds, layout: KvLayout) -> int:
    """Leaves one block."""
    return ceil((needs.total + layout.block_bytes) / (1.0 - limits.headroom_fraction))


def render_plan(plan: MemoryPlan, measured: Mapping[str, int]) -> str:
    """A table of predicted bytes beside `measured` ones, which may lack lines: "runtime", "weights", "KV cache", …."""
    needs = plan.needs
    predicted = {
        "runtime": needs.runtime,
        "weights": needs.weights,
        "KV cache": plan.kv_cache,
        "workspace": needs.workspace,
        "transfer buffers": needs.transfer_buffers,
        "total": plan.total,
        "headroom": plan.headroom,
        "budget": plan.budget_bytes,
    }
    lines = [f"{'memory':<18}{'predicted':>15}{'measured':>15}"]
    for name, size in predicted.items():
        seen = _mib(measured[name]) if name in measured else "–"
        lines.append(f"{name:<18}{_mib(size):>15}{seen:>15}")
    lines.append(
        f"{plan.num_blocks} KV blocks of {plan.block_size} tokens: "
        f"{plan.num_longest_requests:.1f} requests of {plan.context_length} tokens"
    )
    return "\n".join(lines)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB"
