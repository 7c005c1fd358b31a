"""Rotary tables: the cosine and sine of every position, for each way of scaling frequencies. Rotates nothing.

The arithmetic is fp32 in the order of transformers' `modeling_rope_utils`: at position 10,000 a frequency that is off
in its last bit shows in the third decimal.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.core.model_files.config import RopeConfig


@dataclass(frozen=True, slots=True)
class RopeTable:
    """`cos` and `sin`, fp32 [num_positions, head_dim / 2]."""

    cos: Tensor
    sin: Tensor

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of each of `positions` [N], both [N, head_dim / 2]."""
        return self.cos[positions], self.sin[positions]


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int, factors: Tensor | None = None) -> RopeTable:
    """The table of one RopeConfig, on the CPU. Kind "factors" needs `factors`, fp32 [head_dim / 2].

    A value's last bit may depend on its place in the table: workers that share KV need tables of one size.
    """
    positions = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1)
    angles = positions * _frequencies(rope, head_dim, num_positions, factors)
    return RopeTable(angles.cos().mul_(rope.attention_factor), angles.sin().mul_(rope.attention_factor))


def rope_table_bytes(head_dim: int, num_positions: int) -> int:
    return 2 * 4 * num_positions * (head_dim // 2)


def _frequencies(rope: RopeConfig, head_dim: int, num_positions: int, factors: Tensor | None) -> Tensor:
    """Radians a position: [head_dim / 2], or [num_positions, head_dim / 2] where they depend on the position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if rope.kind == "dynamic":
        return _dynamic(rope, head_dim, num_positions, exponents)
    if rope.kind == "factors":
        if factors is None:
            raise ValueError("rope factors are needed, and there are none")
        return 1.0 / rope.theta**exponents / factors.cpu()
    return _SCALED[rope.kind](rope, rope.theta**exponents)


def _default(rope: RopeConfig, wavelengths: Tensor) -> Tensor:
    return 1.0 / wavelengths


def _linear(rope: RopeConfig, wavelengths: Tensor) -> Tensor:
    return 1.0 / wavelengths / rope.factor


def _llama3(rope: RopeConfig, wavelengths: Tensor) -> Tensor:
    """Llama 3.1's: long waves slowed by `factor`, short ones kept, those between mixed."""
    frequencies = 1.0 / wavelengths
    turns = rope.original_context_length / (2 * math.pi / frequencies)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    mixed = (1 - kept) * frequencies / rope.factor + kept * frequencies
    slowed = torch.where(turns < rope.low_freq_factor, frequencies / rope.factor, mixed)
    return torch.where(turns > rope.high_freq_factor, frequencies, slowed)


def _yarn(rope: RopeConfig, wavelengths: Tensor) -> Tensor:
    """YaRN (Peng et al., 2023): slowed by `factor` but for the dimensions that turn often, with a ramp between."""
    num = len(wavelengths)
    first, last = (_dimension_that_turns(turns, rope, 2 * num) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num - 1)
    if first == last:
        last += 0.001
    kept = 1 - ((torch.arange(num, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _dimension_that_turns(num_turns: float, rope: RopeConfig, head_dim: int) -> float:
    """The dimension whose angle makes `num_turns` full turns within the original context."""
    longest = rope.original_context_length / (num_turns * 2 * math.pi)
    return head_dim * math.log(longest) / (2 * math.log(rope.theta))


def _dynamic(rope: RopeConfig, head_dim: int, num_positions: int, exponents: Tensor) -> Tensor:
    """NTK-aware scaling by the length so far. Position p is rotated as if the sequence ended with it.

    So it is in token-by-token generation. A whole prompt rotated by its own length would make a position's KV depend on
    how much of the prompt was there at the time; ours depends on the position alone, whatever the chunks.
    """
    lengths = torch.arange(1, num_positions + 1).clamp(min=rope.original_context_length).unsqueeze(1)
    growth = rope.factor * lengths / rope.original_context_length - (rope.factor - 1)
    # A head of two dimensions turns once a position, whatever the base.
    return 1.0 / (rope.theta * growth ** (head_dim / max(head_dim - 2, 1))) ** exponents


_SCALED: dict[str, Callable[[RopeConfig, Tensor], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
