"""A checkpoint whose every answer can be told beforehand: the next token depends on the last one alone.

A letter is followed by the next letter, z by EOS; a digit by itself; a full stop by EOS; a tab, with which the chat
template ends when tools are offered, by a tool call; everything else by "a". So "abc" is continued with "defgh".
Each token has a runner-up half a logit behind: the letter after the next one, the other of two digits.
"""

import json
from pathlib import Path
from string import ascii_lowercase

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.tiny_models import TinyLlama
from tests.support.tiny_tokenizer import EOS_TOKEN_ID, SPECIAL_TOKENS

BEST_LOGIT, SECOND_LOGIT = 12.0, 11.5
HIDDEN_SIZE = 320
CONTEXT_LENGTH = 2048
ALPHABET = ascii_lowercase
TOOL_NAME = "get_weather"
TOOL_ARGUMENTS = {"city": "Paris"}
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
CALL_BODY = "\n" + json.dumps({"name": TOOL_NAME, "arguments": TOOL_ARGUMENTS}) + "\n"

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\nThe functions are:\n<tools>\n' }}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}
{{- '</tools>\nCall one within <tool_call></tool_call>:\n<tool_call>{"name": ..., "arguments": ...}</tool_call>' }}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}' }}
{{- '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant' + ('\t' if tools and messages[-1].role != 'tool' else '\n') }}
{%- endif %}
"""


def write_alphabet_model(directory: Path) -> Path:
    tokenizer = _tokenizer()
    spec = TinyLlama(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN_SIZE,
        context_length=CONTEXT_LENGTH,
        tie=False,
    )
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(spec.config()))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    save_file(_tensors(spec, tokenizer), directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def token_id(character: str) -> int:
    """Of one ASCII character."""
    found = _tokenizer().encode(character).ids
    assert len(found) == 1
    return found[0]


def _tokenizer() -> Tokenizer:
    """One token a byte, and those of a tool call."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in (CALL_OPEN, CALL_CLOSE, CALL_BODY)])
    return tokenizer


def _followers() -> dict[str, tuple[str, str]]:
    """Text of a token → those of the likeliest and the second likeliest next one."""
    eos = SPECIAL_TOKENS[EOS_TOKEN_ID]
    cycle = ALPHABET + "ab"
    pairs = {letter: (cycle[i + 1], cycle[i + 2]) for i, letter in enumerate(ALPHABET)}
    calls = {"\t": CALL_OPEN, CALL_OPEN: CALL_BODY, CALL_BODY: CALL_CLOSE, CALL_CLOSE: eos}
    return {
        **pairs,
        "z": (eos, "a"),
        "0": ("0", "1"),
        "1": ("1", "0"),
        ".": (eos, "."),
        **{token: (follower, "a") for token, follower in calls.items()},
    }


def _tensors(spec: TinyLlama, tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """Layers that add nothing, embeddings that tell tokens apart, and an output matrix that holds the table."""
    tensors = spec.tensors()
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    followers = {tokenizer.encode(text).ids[0]: pair for text, pair in _followers().items()}
    table = torch.zeros(spec.vocab_size, spec.hidden_size)
    for last in range(spec.vocab_size):
        best, second = followers.get(last, ("a", "b"))
        table[tokenizer.encode(second).ids[0], last] = SECOND_LOGIT
        table[tokenizer.encode(best).ids[0], last] = BEST_LOGIT
    tensors["model.embed_tokens.weight"] = torch.eye(spec.vocab_size, spec.hidden_size)
    tensors["model.norm.weight"] = torch.ones(spec.hidden_size)
    tensors["lm_head.weight"] = table / spec.hidden_size**0.5
    return tensors
