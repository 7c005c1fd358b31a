"""One choice's output as its client sees it: tokens to text, cut at a stop string, tool calls taken out."""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.text.detokenizer import Detokenizer
from coordinator.text.stop_strings import StopMatcher
from coordinator.text.tool_calls import ToolCall, ToolCallParser
from pdserve.core.sampling import FinishReason, SamplingParams, finish_reason_after
from pdserve.core.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Tokens taken (all of them, unless a stop string ended the choice among them), and what may be shown now.

    `token_texts` are what each token adds before stop strings and tool calls are looked for.
    """

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    token_texts: tuple[str, ...] = ()


class OutputText:
    """The text of an EOS or stop token is not part of the output, nor is that of a stop string.

    `prompt_ids`: what the output goes on from. `parser` reads tool calls, where the request offers tools.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        eos_token_ids: frozenset[int],
        stop: Sequence[str],
        parser: ToolCallParser | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer.token_bytes, prompt_ids)
        self._matcher = StopMatcher(stop)
        self._sampling = sampling
        self._eos_token_ids = eos_token_ids
        self._parser = parser
        self._visible_tokens = parser.visible_tokens if parser is not None else frozenset[int]()
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete; the sequence must then be cancelled."""
        return self._matcher.matched is not None

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Take tokens up to and including the one that completes a stop string."""
        texts: list[str] = []
        shown = ""
        for token_id in token_ids:
            texts.append(self._token_text(token_id))
            shown += self._matcher.push(texts[-1])
            if self.stopped:
                break
        self.num_tokens += len(texts)
        return self._piece(shown, token_ids[: len(texts)], texts)

    def flush(self) -> TextPiece:
        """No more tokens come: what was held back for a stop string or a tool call that did not come."""
        piece = self._piece(self._matcher.flush())
        if self._parser is None:
            return piece
        last = self._parser.flush()
        return TextPiece(piece.text + last.text, piece.tool_calls + last.calls)

    def _piece(self, shown: str, token_ids: Sequence[int] = (), texts: Sequence[str] = ()) -> TextPiece:
        if self._parser is None:
            return TextPiece(shown, (), tuple(token_ids), tuple(texts))
        parsed = self._parser.push(shown)
        return TextPiece(parsed.text, parsed.calls, tuple(token_ids), tuple(texts))

    def _token_text(self, token_id: int) -> str:
        if finish_reason_after(token_id, 0, self._sampling, self._eos_token_ids) is FinishReason.STOP:
            return ""
        if token_id in self._visible_tokens:
            return self._tokenizer.special_token_text(token_id)
        return self._detokenizer.push(token_id)


def prompt_token_texts(tokenizer: TextTokenizer, token_ids: Sequence[int]) -> tuple[str, ...]:
    """What each token of a prompt adds to its text; a character cut at the end is left out, as in an output."""
    detokenizer = Detokenizer(tokenizer.token_bytes)
    texts = [detokenizer.push(token_id) for token_id in token_ids]
    first = next((i for i, text in enumerate(texts) if text), None)
    if first is not None and texts[first].startswith(" ") and not tokenizer.decode([token_ids[first]]).startswith(" "):
        texts[first] = texts[first][1:]  # which the tokenizer itself puts before a text, and takes off again
    return tuple(texts)
