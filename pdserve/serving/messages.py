"""Pieces of protobuf that both worker services send or read."""

import time
from collections.abc import Sequence

from pdserve.client.wire import finish_reason_to_proto, logprobs_to_proto
from pdserve.core.block_keys import PrefixGroup
from pdserve.core.sampling import FinishReason, TokenLogprobs
from pdserve.v1 import common_pb2, worker_pb2

MAX_DEADLINE_S = 7 * 86_400.0
"""Longer than anybody waits, and far from where numbers on the wire end."""


def micros(seconds: float) -> int:
    """Seconds as the wire's microseconds; a clock's small step back counts as none."""
    return max(0, round(seconds * 1e6))


def deadline_from(context: worker_pb2.RequestContext) -> float:
    """The request's deadline on this process's monotonic clock, in seconds."""
    return time.monotonic() + min(context.deadline_remaining_ms / 1000, MAX_DEADLINE_S)


def prefix_group(context: worker_pb2.RequestContext) -> PrefixGroup:
    """Whose KV the request may share."""
    return PrefixGroup(context.adapter, context.cache_salt)


def token_output(
    index: int,
    token_id: int,
    logprobs: TokenLogprobs | None,
    finish_reason: FinishReason | None,
    durations: common_pb2.PhaseDurations,
    prompt_logprobs: Sequence[TokenLogprobs] = (),
    *,
    num_cached_tokens: int = 0,
) -> worker_pb2.SequenceOutput:
    """One sampled token, and with a prompt's first one what was asked of the prompt and how much of it was cached."""
    return worker_pb2.SequenceOutput(
        first_index=index,
        token_ids=[token_id],
        logprobs=[] if logprobs is None else [logprobs_to_proto(logprobs)],
        finish_reason=finish_reason_to_proto(finish_reason),
        durations=durations,
        prompt_logprobs=[logprobs_to_proto(entry) for entry in prompt_logprobs],
        num_cached_tokens=num_cached_tokens,
    )
