"""What one configuration made of the texts, and how two compare. Knows no engine and no file."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

ALL_SLICES = "all"


@dataclass(frozen=True, slots=True)
class SliceScore:
    """A text under teacher forcing: every token from the second on, given the true ones before it.

    `nll` is the sum of −ln p of the true tokens, in nats; `top_ids` the greedy choice at each of them.
    """

    name: str
    nll: float
    top_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.top_ids)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.num_tokens)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One configuration's scores. `evaluation_id` is what its workers report; "" for what is no worker of ours."""

    label: str
    evaluation_id: str
    slices: tuple[SliceScore, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One slice beside the reference's: ratio of perplexities, and the share of tokens with the same greedy choice."""

    name: str
    num_tokens: int
    perplexity: float
    perplexity_ratio: float
    agreement: float


def compare(measured: Measurement, reference: Measurement) -> tuple[Comparison, ...]:
    """Slice by slice and, last, all tokens together as slice "all".

    Raises:
        ValueError: the two did not score the same slices.
    """
    pairs = zip(with_all(measured.slices), with_all(reference.slices), strict=True)
    return tuple(_compare(ours, theirs) for ours, theirs in pairs)


def overall(measured: Measurement, reference: Measurement) -> Comparison:
    """All tokens together."""
    return compare(measured, reference)[-1]


def with_all(slices: Iterable[SliceScore]) -> list[SliceScore]:
    """The slices and, last, their tokens together."""
    parts = list(slices)
    top_ids = tuple(chain.from_iterable(part.top_ids for part in parts))
    return [*parts, SliceScore(ALL_SLICES, math.fsum(part.nll for part in parts), top_ids)]


def _compare(ours: SliceScore, theirs: SliceScore) -> Comparison:
    if (ours.name, ours.num_tokens) != (theirs.name, theirs.num_tokens):
        raise ValueError(f"{ours.name} ({ours.num_tokens}) cannot be compared with {theirs.name} ({theirs.num_tokens})")
    num_same = sum(a == b for a, b in zip(ours.top_ids, theirs.top_ids, strict=True))
    return Comparison(
        name=ours.name,
        num_tokens=ours.num_tokens,
        perplexity=ours.perplexity,
        perplexity_ratio=math.exp((ours.nll - theirs.nll) / ours.num_tokens),
        agreement=num_same / ours.num_tokens,
    )
