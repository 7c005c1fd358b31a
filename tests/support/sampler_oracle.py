"""The documented sampling rule, written again in slow plain Python with its own arithmetic; shares no code."""

import math
import struct
from collections import Counter
from collections.abc import Sequence

from pdserve.core.sampling import SamplingParams


def f32(value: float) -> float:
    """Rounded to the nearest fp32."""
    if math.isinf(value):
        return value
    return struct.unpack("<f", struct.pack("<f", value))[0]


def random_fraction(seed: int, position: int, choice: int) -> float:
    words, keys = [position % 2**32, choice, 0, 0], [seed % 2**32, seed >> 32]
    for _ in range(10):
        left, right = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [right // 2**32 ^ words[1] ^ keys[0], right % 2**32, left // 2**32 ^ words[3] ^ keys[1], left % 2**32]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return (words[0] >> 8) / 2**24


def adjusted(logits: Sequence[float], params: SamplingParams, ids: Sequence[int], num_prompt: int, eos: Sequence[int]):
    z = list(logits)
    output = ids[num_prompt:]
    for token, bias in params.logit_bias.items():
        z[token] = f32(z[token] + f32(bias))
    for token, count in Counter(output).items():
        z[token] = f32(z[token] - f32(params.presence_penalty + params.frequency_penalty * count))
    for token in set(ids):
        r = f32(params.repetition_penalty)
        z[token] = f32(z[token] / r) if z[token] > 0 else f32(z[token] * r)
    if len(output) < params.min_tokens:
        for token in set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos)):
            z[token] = -math.inf
    return z


def kept_and_weights(z: Sequence[float], params: SamplingParams) -> tuple[set[int], list[float]]:
    scaled = [f32(value / f32(params.temperature)) for value in z]
    highest = max(scaled)
    weights = [f32(math.exp(f32(value - highest))) for value in scaled]
    order = sorted(range(len(z)), key=lambda token: (-scaled[token], token))
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        total, running, prefix = math.fsum(weights[t] for t in order), 0.0, []
        for token in order:
            prefix.append(token)
            running += weights[token]
            if running >= params.top_p * total:
                break
        order = prefix
    top = max(weights[token] for token in order)
    return {token for token in order if weights[token] >= params.min_p * top}, weights


def slow_sample(
    logits: Sequence[float], params: SamplingParams, ids: Sequence[int], num_prompt: int, eos: Sequence[int] = ()
) -> int | None:
    if any(math.isnan(value) or value == math.inf for value in logits):
        return None
    z = adjusted(logits, params, ids, num_prompt, eos)
    if max(z) == -math.inf:
        return None
    if params.temperature < 1e-5:
        return z.index(max(z))
    kept, weights = kept_and_weights(z, params)
    sums, total = [], 0.0
    for token in sorted(kept):
        total += weights[token]
        sums.append((token, total))
    threshold = random_fraction(params.seed, len(ids), params.choice) * total
    return next(token for token, running in sums if running > threshold)
