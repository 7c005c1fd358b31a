"""Token ids to text, a token at a time. Knows nothing of stop strings or of when a sequence ends."""

import codecs
from collections.abc import Callable


class Detokenizer:
    """Incremental: work per token is bounded by the token, and text once given is never taken back.

    Bytes that cannot be UTF-8 become U+FFFD, one for each maximal part of a character (Unicode 3.9, best practice).
    Bytes that may still become a character are kept back; those left when a sequence ends are dropped.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while it ends inside a character."""
        return self._decoder.decode(self._token_bytes(token_id))
