"""From rows of logits to one token each: a pure function, so that any worker can redo any draw. No row knows another.

Steps, in order: logit bias; presence and frequency penalty over the output, repetition penalty over prompt and output;
mask of end tokens below `min_tokens`; temperature; top_k; top_p; min_p; the draw. Ties go to the lower id throughout.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq

import numpy as np

from pdserve.core.sampling import SamplingParams, TokenLogprobs
from pdserve.engine.draw import Logits, descending, draw
from pdserve.engine.sequence import Sampled, Sequence


def sample_rows(logits: Logits, sequences: Seq[Sequence], eos_token_ids: Collection[int] = ()) -> list[Sampled]:
    """`sample` for each row of `logits`, fp32 [len(sequences), vocab_size]; the plainly greedy rows all at once."""
    best = logits.argmax(axis=1)  # of a row with NaN or +inf, one of these
    finite = np.isfinite(logits[np.arange(len(best)), best])
    return [
        Sampled(token_id if is_finite else None)
        if _is_plainly_greedy(sequence)
        else sample(row, sequence.sampling, sequence.token_ids, sequence.num_prompt_tokens, eos_token_ids)
        for row, sequence, token_id, is_finite in zip(logits, sequences, best.tolist(), finite.tolist(), strict=True)
    ]


def sample(
    logits: Logits,
    params: SamplingParams,
    token_ids: Seq[int],
    num_prompt_tokens: int,
    eos_token_ids: Collection[int] = (),
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
    token_ids: Seq[int],
    num_prompt_tokens: int,
    eos_token_ids: Collection[int],
) -> Logits:
    """The logits after bias, penalties and the min_tokens mask; the very same array if none applies."""
    masked = _ids_masked_by_min_tokens(params, len(token_ids) - num_prompt_tokens, eos_token_ids)
    if not (params.logit_bias or _penalises(params) or masked):
        return logits
    adjusted = logits.copy()
    for token_id, bias in params.logit_bias.items():
        if 0 <= token_id < len(adjusted):
            adjusted[token_id] += np.float32(bias)
    if _penalises(params):
        _penalise(adjusted, params, token_ids, num_prompt_tokens)
    adjusted[[token_id for token_id in masked if 0 <= token_id < len(adjusted)]] = -np.inf
    return adjusted


def raw_logprobs(logits: Logits, token_ids: Seq[int], num_top: int) -> list[TokenLogprobs]:
    """Of each row of raw logits, fp32 [N, vocab_size]: the logprob of its token in `token_ids`, and the highest ones.

    Every row needs a finite maximum.
    """
    return [_raw_logprobs(row, token_id, num_top) for row, token_id in zip(logits, token_ids, strict=True)]


def _raw_logprobs(row: Logits, token_id: int, num_top: int) -> TokenLogprobs:
    highest = np.float64(row.max())
    weights = row.astype(np.float64)
    weights -= highest
    np.exp(weights, out=weights)
    total = highest + np.log(weights.sum())
    top = descending(row, num_top)
    logprobs = row[top] - total
    return TokenLogprobs(float(row[token_id] - total), tuple(zip(top.tolist(), logprobs.tolist(), strict=True)))


def _is_plainly_greedy(sequence: Sequence) -> bool:
    """Whether the token is that of the highest raw logit, and nothing else is asked for."""
    params = sequence.sampling
    return (
        params.greedy
        and params.num_logprobs is None
        and sequence.num_output_tokens >= params.min_tokens
        and not params.logit_bias
        and not _penalises(params)
    )


def _penalises(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


def _ids_masked_by_min_tokens(
    params: SamplingParams, num_output_tokens: int, eos_token_ids: Collection[int]
) -> frozenset[int]:
    if num_output_tokens >= params.min_tokens:
        return frozenset()
    return params.stop_token_ids if params.ignore_eos else params.stop_token_ids.union(eos_token_ids)


def _penalise(logits: Logits, params: SamplingParams, token_ids: Seq[int], num_prompt_tokens: int) -> None:
    """An id seen twice is written twice, with the same value: cheaper than to look for the distinct ones."""
    seen = np.array(token_ids, dtype=np.int64)
    output = seen[num_prompt_tokens:]
    if len(output) > 0:
        counts = np.bincount(output)[output]
        logits[output] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
    if params.repetition_penalty != 1:
        penalty = np.float32(params.repetition_penalty)
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
