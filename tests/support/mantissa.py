"""Damage for negative controls: values with fewer bits than their format has."""

import torch
from torch import Tensor


def rounded(values: Tensor, bits: int) -> Tensor:
    """To `bits` significant bits, the leading one among them (bf16 has 8), in the same dtype."""
    fraction, exponent = torch.frexp(values.float())
    return torch.ldexp((fraction * 2**bits).round() / 2**bits, exponent).to(values.dtype)
