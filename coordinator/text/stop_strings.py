"""Finding stop strings in text that arrives in pieces. Knows nothing of tokens."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text on, except what could still turn out to be the start of a stop string.

    The match that is complete first wins, the longest of those that end at the same character; the result depends on
    the characters alone, not on how they were cut into pieces. Each stop string is followed by the failure function
    of Knuth, Morris and Pratt (1977), so at most max(len(stop)) - 1 characters are held back.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._patterns = [_Pattern(text) for text in stop]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What may be sent on now. Once `matched` is set, everything further is swallowed."""
        if not self._patterns:
            return text
        if self.matched is not None:
            return ""
        pending = self._held + text
        for end in range(len(self._held) + 1, len(pending) + 1):
            complete = [pattern.text for pattern in self._patterns if pattern.advance(pending[end - 1])]
            if complete:
                self.matched, self._held = max(complete, key=len), ""
                return pending[: end - len(self.matched)]
        num_held = max(pattern.num_matched for pattern in self._patterns)
        self._held = pending[len(pending) - num_held :]
        return pending[: len(pending) - num_held]

    def flush(self) -> str:
        """The text held back, when no more can come."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """One stop string and how many of its characters the text ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallback = _failure_function(text)

    def advance(self, char: str) -> bool:
        """Take the next character; True if the text now ends with the whole string."""
        while self.num_matched and self.text[self.num_matched] != char:
            self.num_matched = self._fallback[self.num_matched - 1]
        if self.text[self.num_matched] == char:
            self.num_matched += 1
        return self.num_matched == len(self.text)


def _failure_function(text: str) -> list[int]:
    """For each prefix: the length of its longest proper suffix that is also a prefix of `text`."""
    table = [0]
    for char in text[1:]:
        length = table[-1]
        while length and text[length] != char:
            length = table[length - 1]
        table.append(length + (text[length] == char))
    return table
