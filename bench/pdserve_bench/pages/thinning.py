"""Fewer points for a plot, without losing the worst: of a distribution, and of a series in time. Draws nothing."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def cdf(samples: Floats, max_points: int = 400) -> tuple[Floats, Floats]:
    """Values by size, and for each the share of the samples that is not above it.

    Of many samples it keeps ranks at even steps, and ever more of them towards the slowest, which is always among them.
    """
    values = np.sort(samples)
    size = values.size
    ranks = np.arange(size)
    if size > max_points:
        half = max_points // 2
        even = np.linspace(0, size - 1, half)
        tail = size - np.geomspace(1, size, half)
        ranks = np.unique(np.concatenate([even, tail]).round().astype(np.int64))
    return values[ranks], (ranks + 1) / size


def worst_per_slot(at_s: Floats, values: Floats, num_slots: int = 600) -> tuple[Floats, Floats, float]:
    """The largest value of each of `num_slots` equal slots of time, by time, and how long a slot is.

    No more points than slots are all kept as they are, and the slot's length is 0.
    """
    order = np.argsort(at_s, kind="stable")
    at_s, values = at_s[order], values[order]
    if at_s.size <= num_slots:
        return at_s, values, 0.0
    slot_s = float(at_s[-1] - at_s[0]) / num_slots
    if slot_s == 0:
        return at_s[:1], values.max(keepdims=True), 0.0
    slots = np.minimum((at_s - at_s[0]) // slot_s, num_slots - 1)
    by_slot_and_value = np.lexsort((values, slots))
    last_of_slot = np.flatnonzero(np.diff(slots[by_slot_and_value], append=np.inf))
    kept = by_slot_and_value[last_of_slot]
    return at_s[kept], values[kept], slot_s
