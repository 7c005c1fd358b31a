"""One streamed answer of the OpenAI completions API, from the bytes of its events. Opens no connection."""

import json
from collections.abc import Mapping
from typing import Any

from pdserve_bench.load.client import Answer, NoteTokens, RequestError
from pdserve_bench.load.sse import EventParser

_SHOWN_CHARACTERS = 300


def shown(body: bytes) -> str:
    """The beginning of what a server said, for an error's message."""
    return body.decode("utf-8", "replace").strip()[:_SHOWN_CHARACTERS]


class AnswerReader:
    """Calls `note` for each event that carries tokens: as many as its usage adds or, in a stream whose events do not
    carry usage, one where there is text. `whole` once [DONE] has come."""

    def __init__(self, note: NoteTokens) -> None:
        self._note = note
        self._parser = EventParser()
        self._texts: list[str] = []
        self._finish_reason = ""
        self._usage: Mapping[str, Any] = {}
        self._num_tokens = 0
        self._counts_texts = False
        self.whole = False

    def feed(self, part: bytes) -> None:
        """Raises RequestError: the server reports an error, or says what is no part of an answer."""
        for data in self._parser.feed(part):
            if self.whole:
                return
            if data == b"[DONE]":
                self.whole = True
            else:
                self._read(data)

    def answer(self) -> Answer:
        """Raises RequestError: the stream ended before [DONE]."""
        if not self.whole:
            raise RequestError("the stream ended without [DONE]")
        details: Mapping[str, Any] = self._usage.get("prompt_tokens_details") or {}
        return Answer(
            finish_reason=self._finish_reason,
            num_output_tokens=self._usage.get("completion_tokens"),
            num_cached_tokens=details.get("cached_tokens"),
            counts_are_exact=not self._counts_texts,
            output="".join(self._texts),
        )

    def _read(self, data: bytes) -> None:
        try:
            event = json.loads(data)
            error, choices, usage = event.get("error"), event.get("choices"), event.get("usage")
            self._usage = {**usage} if usage else self._usage
            num_tokens = self._take(choices[0], usage) if choices else 0
        except (ValueError, LookupError, TypeError, AttributeError):
            raise RequestError(f"no event of a completion: {shown(data)}") from None
        if error is not None:
            raise RequestError(f"in mid-stream: {shown(data)}")
        if num_tokens > 0:
            self._note(num_tokens)

    def _take(self, choice: Mapping[str, Any], usage: Mapping[str, Any] | None) -> int:
        """The number of new tokens. A server may give usage with its last choice only: then events count by text."""
        text = choice.get("text") or ""
        self._texts.append(text)
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        if usage is None or self._counts_texts:
            self._counts_texts = self._counts_texts or text != ""
            return 1 if text else 0
        before, self._num_tokens = self._num_tokens, int(usage["completion_tokens"])
        return self._num_tokens - before
