"""Logprobs as workers send them to what clients are told: complete, and finite. Knows no wire format."""

from collections.abc import Sequence

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.sampling import TokenLogprobs

LOGPROB_FLOOR = -9999.0
"""What is told in place of anything below, −∞ included, which JSON cannot say."""


def shown_logprobs(
    logprobs: Sequence[TokenLogprobs], num_wanted: int | None, num_tokens: int
) -> tuple[TokenLogprobs, ...]:
    """The logprobs of `num_tokens` tokens, none below the floor; nothing if they were not asked for.

    Raises:
        PdserveError: INTERNAL, a worker left some out.
    """
    if num_wanted is None:
        return ()
    if len(logprobs) != num_tokens:
        message = f"a worker sent logprobs of {len(logprobs)} tokens instead of {num_tokens}"
        raise PdserveError(ErrorReason.INTERNAL, message)
    return tuple(map(_floored, logprobs))


def _floored(token: TokenLogprobs) -> TokenLogprobs:
    lowest = min(token.logprob, token.top[-1][1]) if token.top else token.logprob
    if lowest >= LOGPROB_FLOOR:
        return token
    top = tuple((token_id, max(logprob, LOGPROB_FLOOR)) for token_id, logprob in token.top)
    return TokenLogprobs(max(token.logprob, LOGPROB_FLOOR), top)
