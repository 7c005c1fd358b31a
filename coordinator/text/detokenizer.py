"""Token ids to text, a token at a time. Knows nothing of stop strings or of when a sequence ends."""

import codecs
from collections.abc import Callable, Sequence

_MAX_TAIL_IDS = 16
_MAX_UNFINISHED_BYTES = 3


class Detokenizer:
    """Incremental: work per token is bounded by the token, and text once given is never taken back.

    Bytes that cannot be UTF-8 become U+FFFD, one for each maximal part of a character (Unicode 3.9, best practice).
    Bytes that may still become a character are kept back; those left when a sequence ends are dropped.

    Args:
        token_bytes: the bytes that a token adds to a text.
        prompt_tail: the prompt's last ids (or all of them). A character begun there is given whole when the output
            completes it, and not at all when the output does not go on with it.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], prompt_tail: Sequence[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(_last_bytes(token_bytes, prompt_tail))
        self._begun_in_prompt = self._decoder.getstate()[0]

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while it ends inside a character."""
        data = self._token_bytes(token_id)
        if self._begun_in_prompt and data:
            if not _goes_on(self._begun_in_prompt, data):
                self._decoder.reset()
            self._begun_in_prompt = b""
        text = self._decoder.decode(data)
        return text + self._decoder.decode(b"", final=True) if self._holds_a_surrogate() else text

    def _holds_a_surrogate(self) -> bool:
        """Python's decoder waits for the last byte of a surrogate, although none is a character."""
        held = self._decoder.getstate()[0]
        return len(held) == 2 and held[0] == 0xED and held[1] >= 0xA0


def _last_bytes(token_bytes: Callable[[int], bytes], ids: Sequence[int]) -> bytes:
    """The end of the text's bytes, at least as long as the longest unfinished character if there is as much."""
    data = b""
    for token_id in reversed(ids[-_MAX_TAIL_IDS:]):
        data = token_bytes(token_id) + data
        if len(data) >= _MAX_UNFINISHED_BYTES:
            break
    return data


def _goes_on(unfinished: bytes, data: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")(errors="strict").decode(unfinished + data[:1])
    except UnicodeDecodeError:
        return False
    return True
