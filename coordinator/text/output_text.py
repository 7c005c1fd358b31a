"""One choice's output as its client sees it: tokens to text, cut at a stop string, flushed at the end."""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.text.detokenizer import Detokenizer
from coordinator.text.stop_strings import StopMatcher
from pdserve.core.sampling import FinishReason, SamplingParams, finish_reason_after
from pdserve.core.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Tokens taken (all of them, unless a stop string ended the choice among them) and the text to send now."""

    token_ids: tuple[int, ...]
    text: str


class OutputText:
    """The text of an EOS or stop token is not part of the output, nor is that of a stop string."""

    def __init__(
        self, tokenizer: TextTokenizer, sampling: SamplingParams, eos_token_ids: frozenset[int], stop: Sequence[str]
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer.token_bytes)
        self._matcher = StopMatcher(stop)
        self._sampling = sampling
        self._eos_token_ids = eos_token_ids
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete; the sequence must then be cancelled."""
        return self._matcher.matched is not None

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Take tokens up to and including the one that completes a stop string."""
        text = ""
        for num_taken, token_id in enumerate(token_ids, start=1):
            self.num_tokens += 1
            if not self._is_stop_token(token_id):
                text += self._matcher.push(self._detokenizer.push(token_id))
            if self.stopped:
                return TextPiece(tuple(token_ids[:num_taken]), text)
        return TextPiece(tuple(token_ids), text)

    def flush(self) -> str:
        """What was held back for a stop string that did not come."""
        return self._matcher.flush()

    def _is_stop_token(self, token_id: int) -> bool:
        return finish_reason_after(token_id, 0, self._sampling, self._eos_token_ids) is FinishReason.STOP
