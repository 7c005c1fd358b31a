"""The `logprobs` object of /v1/completions, built as a choice's text is shown. Sends nothing."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coordinator.generation.generation import ChoiceDelta, ChoiceEnd, GenerationEvent, PromptEcho
from coordinator.http_api.completion_answers import CompletionLogprobs
from pdserve.core.sampling import TokenLogprobs
from pdserve.core.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class _Entry:
    """A token and where its text begins in the choice's; `logprobs` is None for the very first of a prompt."""

    token_id: int
    text: str
    offset: int
    logprobs: TokenLogprobs | None


class LogprobsWriter:
    """One choice's. An entry leaves once all of its token's text is shown: what a stop string may still cut waits.

    Whole or in pieces, `tokens[i]` is `text[text_offset[i]:][:len(tokens[i])]`, where `text` is all that the choice
    shows, its prompt included if echoed. So it is empty for a special token and for a character's first bytes, and cut
    where a stop string cut the text.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._names: dict[int, str] = {}
        self._waiting: deque[_Entry] = deque()
        self._num_chars = 0
        self._num_shown = 0

    def write(self, event: GenerationEvent) -> CompletionLogprobs | None:
        """Take the choice's next event; the entries to send with it, None if there are none."""
        match event:
            case PromptEcho() | ChoiceDelta():
                if event.logprobs:
                    self._add(event.token_ids, event.token_texts, event.logprobs)
                else:
                    self._num_chars += sum(map(len, event.token_texts))
                self._num_shown += len(event.text)
                return self._object(self._shown())
            case ChoiceEnd():
                return self._object(self._left())

    def _add(self, token_ids: Sequence[int], texts: Sequence[str], logprobs: Sequence[TokenLogprobs | None]) -> None:
        for token_id, text, of_token in zip(token_ids, texts, logprobs, strict=True):
            self._waiting.append(_Entry(token_id, text, self._num_chars, of_token))
            self._num_chars += len(text)

    def _shown(self) -> Iterator[_Entry]:
        while self._waiting and self._waiting[0].offset + len(self._waiting[0].text) <= self._num_shown:
            yield self._waiting.popleft()

    def _left(self) -> Iterator[_Entry]:
        while self._waiting:
            entry = self._waiting.popleft()
            offset = min(entry.offset, self._num_shown)
            yield _Entry(entry.token_id, entry.text[: self._num_shown - offset], offset, entry.logprobs)

    def _object(self, entries: Iterator[_Entry]) -> CompletionLogprobs | None:
        taken = list(entries)
        if not taken:
            return None
        return CompletionLogprobs(
            tokens=[entry.text for entry in taken],
            token_logprobs=[entry.logprobs.logprob if entry.logprobs else None for entry in taken],
            top_logprobs=[self._top(entry) for entry in taken],
            text_offset=[entry.offset for entry in taken],
        )

    def _top(self, entry: _Entry) -> dict[str, float] | None:
        """By text. The token itself is always among them; of two ids with one text the better stays."""
        if entry.logprobs is None:
            return None
        best: dict[str, float] = {}
        for token_id, logprob in (*entry.logprobs.top, (entry.token_id, entry.logprobs.logprob)):
            best.setdefault(self._name(token_id), logprob)
        return best

    def _name(self, token_id: int) -> str:
        """Remembered: the same few tokens come again and again."""
        name = self._names.get(token_id)
        if name is None:
            name = self._names[token_id] = token_name(self._tokenizer, token_id)
        return name


def token_name(tokenizer: TextTokenizer, token_id: int) -> str:
    """A token's own text; `bytes:\\xe2\\x82` where it is no whole UTF-8; a special token's in the vocabulary."""
    data = tokenizer.token_bytes(token_id)
    try:
        data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return tokenizer.token_text(token_id)


def joined(pieces: Sequence[CompletionLogprobs | None]) -> CompletionLogprobs | None:
    """The object of a whole answer, from those of its pieces."""
    found = [piece for piece in pieces if piece is not None]
    if not found:
        return None
    return CompletionLogprobs(
        tokens=[token for piece in found for token in piece.tokens],
        token_logprobs=[logprob for piece in found for logprob in piece.token_logprobs],
        top_logprobs=[top for piece in found for top in piece.top_logprobs],
        text_offset=[offset for piece in found for offset in piece.text_offset],
    )
