"""Text to token ids and token ids to bytes, for one model. Knows nothing of streams, stop strings or chat."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer

from pdserve.core.model_files.config import bad_model
from pdserve.core.model_files.damage import damaged
from pdserve.core.model_files.files import ModelFiles
from pdserve.core.model_files.hugging_face import read_json
from pdserve.core.tokenizer.gguf import build_gguf_tokenizer
from pdserve.core.tokenizer.parts import max_chars_per_token
from pdserve.core.tokenizer.token_bytes import token_bytes_table

# Read by the library when it encodes: it must start no threads of its own, which would compete with the workers.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_GGUF_SPECIAL_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True, slots=True)
class TokenizerText:
    """What a model's files say besides the vocabulary: the chat template, and `bos_token`, `eos_token`, … as text."""

    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict[str, str])


class TextTokenizer:
    """One model's tokenizer. Safe to call from several threads; `encode` lets other threads run meanwhile."""

    def __init__(self, tokenizer: Tokenizer, text: TokenizerText | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._token_bytes = token_bytes_table(tokenizer)
        self._special_texts = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        self._special_ids = {text: token_id for token_id, text in self._special_texts.items()}
        self._max_chars_per_token = max_chars_per_token(tokenizer)
        text = text or TokenizerText()
        self.chat_template = text.chat_template
        self.special_tokens = text.special_tokens

    @property
    def num_tokens(self) -> int:
        """Highest id with a token, plus one. A model's embedding may have more rows."""
        return len(self._token_bytes)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`; `add_special` adds what the model expects around plain text, such as a BOS."""
        # `encode` would hold the interpreter lock: a megabyte of text stops every other thread for seconds.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids

    def least_num_tokens(self, text: str) -> int:
        """A lower bound of `len(encode(text))`, found without encoding; 0 where none is known."""
        return len(text) // self._max_chars_per_token if self._max_chars_per_token else 0

    def decode(self, token_ids: Iterable[int]) -> str:
        """The whole text of `token_ids`, special tokens left out; invalid UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes, perhaps part of a character, that `token_id` adds to a text.

        Empty for special tokens and for ids without a token.
        """
        return self._token_bytes[token_id] if 0 <= token_id < len(self._token_bytes) else b""

    def token_text(self, token_id: int) -> str:
        """`token_id` alone, for display: U+FFFD for parts of characters; a special token's text in the vocabulary."""
        return self.special_token_text(token_id) or self.token_bytes(token_id).decode("utf-8", errors="replace")

    def special_token_text(self, token_id: int) -> str:
        """A special token's text in the vocabulary; empty for every other id."""
        return self._special_texts.get(token_id, "")

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token written `text`; None if there is none."""
        return self._special_ids.get(text)


def load_tokenizer(files: ModelFiles) -> TextTokenizer:
    """The tokenizer of a model on disk, with its chat template if it has one.

    Raises:
        PdserveError: UNSUPPORTED, naming the kind of tokenizer; INVALID_ARGUMENT, naming what is missing or broken.
    """
    if files.gguf_metadata is not None:
        return TextTokenizer(build_gguf_tokenizer(files.gguf_metadata), _gguf_text(files.gguf_metadata))
    return TextTokenizer(_read_tokenizer_json(files.source / "tokenizer.json"), _directory_text(files.source))


def _read_tokenizer_json(path: Path) -> Tokenizer:
    if not path.exists():
        raise bad_model(
            f"there is no {path}; transformers' AutoTokenizer makes one of other formats, by save_pretrained"
        )
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise bad_model(f"cannot read {path}: {error}") from error
    try:
        return Tokenizer.from_str(content)
    except Exception as error:
        raise damaged(path, f"is not a tokenizer this version can read: {error}") from error


def _directory_text(directory: Path) -> TokenizerText:
    config_path, template_path = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    config = read_json(config_path) if config_path.exists() else {}
    try:
        template = template_path.read_text(encoding="utf-8") if template_path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise bad_model(f"cannot read {template_path}: {error}") from error
    special = {name: _token_text(config.get(name)) for name in _GGUF_SPECIAL_KEYS}
    return TokenizerText(
        template if template is not None else _configured_template(config.get("chat_template")),
        {name: text for name, text in special.items() if text is not None},
    )


def _gguf_text(metadata: Mapping[str, object]) -> TokenizerText:
    tokens = cast("list[str]", metadata["tokenizer.ggml.tokens"])
    template = metadata.get("tokenizer.chat_template")
    special = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _GGUF_SPECIAL_KEYS.items()}
    return TokenizerText(
        template if isinstance(template, str) else None,
        {name: tokens[i] for name, i in special.items() if isinstance(i, int) and 0 <= i < len(tokens)},
    )


def _token_text(value: object) -> str | None:
    content: object = cast("dict[str, object]", value).get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _configured_template(value: object) -> str | None:
    """A template, or of several named ones the one called "default"."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        entries = [cast("dict[str, object]", e) for e in cast("list[object]", value) if isinstance(e, dict)]
        default = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
        return default if isinstance(default, str) else None
    return None
