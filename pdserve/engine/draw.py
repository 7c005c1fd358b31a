"""From one row of logits, scaled by the temperature, to a token: top_k, top_p, min_p, and the draw itself.

The rule fixes every rounding: running sums are in fp64, one weight after another. Where a faster sum cannot differ in
its answer it is taken instead; no more is sorted than may be kept.
"""

import numpy as np
from numpy.typing import NDArray

from pdserve.core.sampling import SamplingParams
from pdserve.engine.philox import uniform

Logits = NDArray[np.float32]
Weights = NDArray[np.float64]
Ids = NDArray[np.int64]
_FIRST_PREFIX = 256
_MIN_GROUPS = 512
_BLOCK = 512
_MAX_NATS, _BUCKETS_PER_NAT = np.float32(128), np.float32(64)


def draw(scaled: Logits, params: SamplingParams, position: int) -> int:
    """Filters and the draw for the token at absolute `position`; `scaled`: by the temperature, its maximum finite."""
    highest = scaled.max()
    ids = _kept_by_top_k_and_top_p(scaled, highest, params)
    weights = token_weights(scaled if ids is None else scaled[ids], highest)
    if params.min_p > 0:
        kept = np.flatnonzero(weights >= params.min_p)  # the best one's weight is 1
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    chosen = first_above(weights, uniform(params.seed, position, params.choice))
    return chosen if ids is None else int(ids[chosen])


def token_weights(scaled: Logits, highest: np.float32) -> Weights:
    """exp(z − highest) rounded to fp32, widened to fp64. Computed in fp64 first: fp32 exp differs between libraries."""
    rounded = scaled - highest
    weights = rounded.astype(np.float64)
    np.exp(weights, out=weights)
    rounded[:] = weights
    weights[:] = rounded
    return weights


def first_above(weights: Weights, fraction: float) -> int:
    """The first index whose running sum exceeds `fraction` of the last one."""
    found = _first_above_by_blocks(weights, fraction) if len(weights) > _BLOCK else None
    if found is not None:
        return found
    running: Weights = np.cumsum(weights)
    return int(np.searchsorted(running, fraction * float(running[-1]), side="right"))


def _first_above_by_blocks(weights: Weights, fraction: float) -> int | None:
    """The same from sums of blocks, which take a fifth of the time; None where rounding might decide."""
    sums: Weights = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK))
    ends: Weights = np.cumsum(sums)
    threshold = float(fraction * ends[-1])
    block = int(np.searchsorted(ends, threshold, side="right"))
    start = block * _BLOCK
    index = _crossing(ends, block, weights[start : start + _BLOCK], threshold, len(weights))
    return None if index is None else start + index


def descending(values: Logits, count: int) -> Ids:
    """The ids of the `count` highest values, highest first, ties by id; all of them if they are fewer."""
    if count < 1:
        return np.empty(0, dtype=np.int64)
    ids = np.flatnonzero(values >= _reached_by(values, count))
    order = np.argsort(-values[ids], kind="stable")[:count]
    return ids[order]


def _reached_by(values: Logits, count: int) -> np.float32:
    """A value that at least `count` values reach and few others: the `count`-th highest of the maxima of groups."""
    num_groups = max(2 * count, _MIN_GROUPS)
    depth = len(values) // num_groups
    if depth < 2:
        return np.float32(-np.inf)
    maxima = values[: depth * num_groups].reshape(depth, num_groups).max(axis=0)
    found: np.float32 = np.partition(maxima, num_groups - count)[num_groups - count]
    return found


def _kept_by_top_k_and_top_p(scaled: Logits, highest: np.float32, params: SamplingParams) -> Ids | None:
    """Ascending; None for all of them."""
    if 0 < params.top_k < len(scaled):
        ids = descending(scaled, params.top_k)
        if params.top_p < 1:
            weights = token_weights(scaled[ids], highest)
            ids = ids[: _num_to_reach(params.top_p * weights.sum(), weights)]
        return np.sort(ids)
    return _top_p(scaled, highest, params.top_p) if params.top_p < 1 else None


def _top_p(scaled: Logits, highest: np.float32, top_p: float) -> Ids:
    """The shortest descending prefix whose share reaches `top_p`, ascending."""
    weights = token_weights(scaled, highest)
    needed = float(top_p * weights.sum())
    prefix = descending(scaled, _FIRST_PREFIX)
    if np.cumsum(weights[prefix])[-1] < needed:
        found = _top_p_by_buckets(scaled, highest, weights, needed)
        if found is not None:
            return found
        prefix = descending(scaled, len(scaled))
    return np.sort(prefix[: _num_to_reach(needed, weights[prefix])])


def _num_to_reach(needed: float, weights: Weights) -> int:
    return int(np.searchsorted(np.cumsum(weights), needed)) + 1


def _top_p_by_buckets(scaled: Logits, highest: np.float32, weights: Weights, needed: float) -> Ids | None:
    """The same from sums of buckets of like values, of which only one is sorted; None where rounding might decide."""
    depth = np.minimum(highest - scaled, _MAX_NATS)
    depth *= _BUCKETS_PER_NAT
    bucket_of = depth.astype(np.int64)
    ends: Weights = np.cumsum(np.bincount(bucket_of, weights=weights).astype(np.float64, copy=False))
    bucket = int(np.searchsorted(ends, needed))
    members = np.flatnonzero(bucket_of == bucket)
    members = members[np.argsort(-scaled[members], kind="stable")]
    index = _crossing(ends, bucket, weights[members], needed, len(weights))
    if index is None:
        return None
    kept = bucket_of < bucket
    kept[members[: index + 1]] = True
    return np.flatnonzero(kept)


def _crossing(ends: Weights, part: int, weights: Weights, threshold: float, num_added: int) -> int | None:
    """The first index among `weights`, those of a part, whose running sum exceeds `threshold`; `ends`: of the parts.

    Two sums of n weights in different orders differ by less than n · 2⁻⁵² of the total, and so do thresholds that are a
    share of it. None if twice both might make it another index.
    """
    running: Weights = np.cumsum(weights)
    if part > 0:
        running += ends[part - 1]
    margin = num_added * 2.0**-50 * float(ends[-1])
    index = int(np.searchsorted(running, threshold - margin, side="right"))
    clear = 0 < index < len(running) and running[index] > threshold + margin
    return index if clear else None
