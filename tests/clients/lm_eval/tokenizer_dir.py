"""Writes the tokenizer of a model file as a Hugging Face directory, for clients that tokenise themselves.

`python -m tests.clients.lm_eval.tokenizer_dir MODEL DIRECTORY`
"""

import sys
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from pdserve.core.model_files import open_model_files
from pdserve.core.tokenizer import load_tokenizer


def write_tokenizer_dir(model: Path, directory: Path) -> None:
    tokenizer = load_tokenizer(open_model_files(model))
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, eos_token=tokenizer.special_tokens.get("eos_token")
    )
    saved.chat_template = tokenizer.chat_template
    saved.save_pretrained(directory)


if __name__ == "__main__":
    write_tokenizer_dir(Path(sys.argv[1]), Path(sys.argv[2]))
