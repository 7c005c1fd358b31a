"""The sampler written plainly: one row, one step and one whole array after another, every sum in the order of the rule.

`pdserve.engine.sampler` must equal it bit for bit. (`sampler_oracle` is a second reading of the rule, in plain Python.)
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pdserve.core.sampling import SamplingParams, TokenLogprobs
from pdserve.engine.philox import uniform
from pdserve.engine.sequence import Sampled

Logits = NDArray[np.float32]
Weights = NDArray[np.float64]
Ids = NDArray[np.int64]
_FIRST_PREFIX = 256


def sample(
    logits: Logits,
    params: SamplingParams,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    eos_token_ids: Iterable[int] = (),
) -> Sampled:
    """Draw the token that follows `token_ids` (prompt and output) from `logits`, fp32 [vocab_size], left as they are.

    `Sampled(None)` if a NaN or +inf is among them, penalties or temperature overflow, or nothing finite is left to draw
    from.
    """
    if not np.isfinite(logits.max()):
        return Sampled(None)
    with np.errstate(over="ignore"):
        adjusted = adjust(logits, params, token_ids, num_prompt_tokens, eos_token_ids)
        scaled = adjusted if params.greedy else adjusted / np.float32(params.temperature)
    if not np.isfinite(scaled.max()):
        return Sampled(None)
    token_id = int(scaled.argmax()) if params.greedy else draw(scaled, params, len(token_ids))
    if params.num_logprobs is None:
        return Sampled(token_id)
    (logprobs,) = raw_logprobs(logits[np.newaxis], [token_id], params.num_logprobs)
    return Sampled(token_id, logprobs)


def adjust(
    logits: Logits,
    params: SamplingParams,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    eos_token_ids: Iterable[int],
) -> Logits:
    """The logits after bias, penalties and the min_tokens mask; the very same array if none applies."""
    output = token_ids[num_prompt_tokens:]
    masked = _ids_masked_by_min_tokens(params, len(output), eos_token_ids)
    penalised = params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
    if not (params.logit_bias or penalised or masked):
        return logits
    adjusted = logits.copy()
    for token_id, bias in params.logit_bias.items():
        if 0 <= token_id < len(adjusted):
            adjusted[token_id] += np.float32(bias)
    if penalised:
        _penalise(adjusted, params, token_ids, output)
    adjusted[[token_id for token_id in masked if 0 <= token_id < len(adjusted)]] = -np.inf
    return adjusted


def draw(scaled: Logits, params: SamplingParams, position: int) -> int:
    """Filters and the draw for the token at absolute `position`; `scaled`: by the temperature, its maximum finite."""
    weights = token_weights(scaled)
    kept = _kept_ids(scaled, weights, params)
    running: Weights = np.cumsum(weights if kept is None else weights[kept])
    threshold = uniform(params.seed, position, params.choice) * running[-1]
    chosen = int(np.count_nonzero(running <= threshold))
    return chosen if kept is None else int(kept[chosen])


def token_weights(scaled: Logits) -> Weights:
    """exp(z − max) rounded to fp32, widened to fp64. Computed in fp64 first: fp32 exp differs between libraries."""
    exact: Weights = np.exp((scaled - scaled.max()).astype(np.float64))
    return exact.astype(np.float32).astype(np.float64)


def raw_logprobs(logits: Logits, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Of each row of raw logits, fp32 [N, vocab_size]: the logprob of its token in `token_ids`, and the highest ones.

    Every row needs a finite maximum.
    """
    highest = logits.max(axis=1).astype(np.float64)
    weights = logits.astype(np.float64)
    weights -= highest[:, np.newaxis]
    np.exp(weights, out=weights)
    subtracted = highest + np.log(weights.sum(axis=1))
    return [
        TokenLogprobs(
            float(row[token_id] - total),
            tuple((int(i), float(row[i] - total)) for i in _descending(row, min(num_top, len(row)))),
        )
        for row, token_id, total in zip(logits, token_ids, subtracted, strict=True)
    ]


def _ids_masked_by_min_tokens(
    params: SamplingParams, num_output_tokens: int, eos_token_ids: Iterable[int]
) -> frozenset[int]:
    if num_output_tokens >= params.min_tokens:
        return frozenset()
    return params.stop_token_ids if params.ignore_eos else params.stop_token_ids.union(eos_token_ids)


def _penalise(logits: Logits, params: SamplingParams, token_ids: Sequence[int], output: Sequence[int]) -> None:
    seen, counts = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
    logits[seen] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
    if params.repetition_penalty != 1:
        seen = np.unique(np.asarray(token_ids, dtype=np.int64))
        penalty = np.float32(params.repetition_penalty)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)


def _kept_ids(scaled: Logits, weights: Weights, params: SamplingParams) -> Ids | None:
    """The ids that all filters keep, ascending; None for all of them."""
    size = len(scaled)
    candidates: Ids | None = None
    if 0 < params.top_k < size:
        candidates = _descending(scaled, params.top_k)
    if params.top_p < 1:
        candidates = _top_p(scaled, weights, params.top_p, candidates)
    if params.min_p > 0:
        if candidates is None:
            candidates = np.arange(size)
        candidates = candidates[weights[candidates] >= params.min_p * weights[candidates].max()]
    return None if candidates is None else np.sort(candidates)


def _top_p(scaled: Logits, weights: Weights, top_p: float, candidates: Ids | None) -> Ids:
    """The shortest descending prefix whose share reaches `top_p`; sorts only as far as that prefix may go."""
    needed = top_p * (weights if candidates is None else weights[candidates]).sum()
    length = _FIRST_PREFIX
    while True:
        prefix = candidates if candidates is not None else _descending(scaled, min(length, len(scaled)))
        running: Weights = np.cumsum(weights[prefix])
        if running[-1] >= needed or len(prefix) == len(scaled) or candidates is not None:
            return prefix[: int(np.count_nonzero(running < needed)) + 1]
        length *= 16


def _descending(values: Logits, count: int) -> Ids:
    """The ids of the `count` highest values, highest first, ties by id."""
    if count <= 0:
        return np.empty(0, dtype=np.int64)
    if count < len(values):
        threshold = np.partition(values, len(values) - count)[len(values) - count]
        above = np.flatnonzero(values > threshold)
        equal = np.flatnonzero(values == threshold)[: count - len(above)]
        ids = np.concatenate((above, equal))
    else:
        ids = np.arange(len(values))
    order = np.lexsort((ids, -values[ids]))
    return ids[order]
