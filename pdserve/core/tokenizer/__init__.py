"""Text to token ids and token ids to bytes, from a model's files. Knows nothing of streams, stop strings or chat."""

from pdserve.core.tokenizer.text_tokenizer import TextTokenizer, TokenizerText, load_tokenizer

__all__ = ["TextTokenizer", "TokenizerText", "load_tokenizer"]
