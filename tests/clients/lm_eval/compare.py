"""Compares what lm-eval got from the server with transformers on the same weights, sample by sample.

`python -m tests.clients.lm_eval.compare MODEL OUTPUT_DIR`, where run.sh has left its output. Prints one line a task;
exits with 1 if a log-likelihood differs by more than `TOLERANCE` or a greedy text at all.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support.oracle import build_oracle

TOLERANCE = 0.01


class Reference:
    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        self._model = model
        self._tokenizer = tokenizer

    def log_likelihood(self, context: str, continuation: str) -> float:
        """As lm-eval cuts it: the tokens of both together, less as many as the context has alone."""
        whole = self._ids(context + continuation)
        return self._sum_logprobs(whole, len(self._ids(context)))

    def rolling_log_likelihood(self, text: str) -> float:
        """Of every token, the first after EOS."""
        return self._sum_logprobs([self._tokenizer.eos_token_id, *self._ids(text)], 1)

    def greedy(self, prompt: str, until: list[str], max_tokens: int) -> str:
        ids = self._ids(prompt)
        text = ""
        for count in range(1, max_tokens + 1):
            ids.append(int(self._logits(ids)[-1].argmax()))
            if ids[-1] == self._tokenizer.eos_token_id:
                break
            text = self._tokenizer.decode(ids[-count:])
            if any(stop in text for stop in until):
                return text[: min(text.index(stop) for stop in until if stop in text)]
        return text

    def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _logits(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self._model(torch.tensor([ids])).logits[0].float()

    def _sum_logprobs(self, ids: list[int], first: int) -> float:
        logprobs = self._logits(ids).log_softmax(-1)
        return sum(float(logprobs[position - 1, ids[position]]) for position in range(first, len(ids)))


def differences(samples: Iterable[dict[str, Any]], reference: Reference) -> Iterator[float]:
    """Of each answer: that of log-likelihoods, or 0 and 1 for texts that are equal or not."""
    for sample in samples:
        for arguments, answers in zip(sample["arguments"].values(), sample["resps"], strict=True):
            first, second = arguments["arg_0"], arguments.get("arg_1")
            if isinstance(second, dict):
                prompt = first if isinstance(first, str) else reference.chat_prompt(json.loads(first[0]))
                text = reference.greedy(prompt, second["until"], second["max_gen_toks"])
                yield float(text != answers[0])
            elif second is None:
                yield abs(float(answers[0]) - reference.rolling_log_likelihood(first))
            else:
                yield abs(float(answers[0][0]) - reference.log_likelihood(first, second))


def main(model: Path, output: Path) -> int:
    tokenizer = AutoTokenizer.from_pretrained(output / "tokenizer")
    reference = Reference(build_oracle(model).eval(), tokenizer)
    worst = 0.0
    for path in sorted(output.glob("*/*/samples_*.jsonl")):
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        found = list(differences(samples, reference))
        worst = max(worst, *found)
        name = f"{path.relative_to(output).parts[0]}/{path.name.split('_20')[0].removeprefix('samples_')}"
        sys.stdout.write(f"{name}: {len(found)} answers, largest difference {max(found):.6f}\n")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
