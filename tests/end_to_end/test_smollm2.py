"""The real default model through the whole fleet, with transformers as the judge."""

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from pdserve.core.model_files import open_model_files
from pdserve.core.sampling import FinishReason
from pdserve.core.tokenizer import load_tokenizer
from tests.support.fleet import COLOCATED, DISAGGREGATED, Fleet, Output, cancel_after, run_fleet
from tests.support.oracle import build_oracle, greedy_after, oracle_greedy, oracle_logits

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800)]

NUM_TOKENS = 64
MAX_BF16_GAP = 0.25
ROOT = Path(__file__).parents[2]
TOPOLOGIES = pytest.mark.parametrize("roles", [DISAGGREGATED, COLOCATED], ids=["disaggregated", "colocated"])

FEW = (5, 16, 17, 65, 129)
"""For the quick tests: a short prompt, block edges, and chunk edges at 64."""

ALL = (5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 300, 511, 512, 513, 1025, 2000)
"""20 prompts, around every block edge (16) and every chunk edge (16, 64, 512)."""


@dataclass(frozen=True)
class Judge:
    """Prompts of natural text by length, and what a transformers model makes of them."""

    model: LlamaForCausalLM
    prompts: Mapping[int, list[int]]

    def greedy(self, length: int, num_tokens: int) -> list[int]:
        return oracle_greedy(self.model, self.prompts[length], num_tokens)

    def would_say(self, length: int, output: Sequence[int]) -> list[int]:
        return greedy_after(self.model, self.prompts[length], output)

    def gap(self, length: int, prefix: Sequence[int], ours: int, theirs: int) -> float:
        """How much the judge prefers its own token to ours, in logits, after prompt and `prefix`."""
        logits = oracle_logits(self.model, [*self.prompts[length], *prefix])[-1]
        return float(logits[theirs] - logits[ours])


@pytest.fixture(scope="session")
def prompts(smollm2: Path) -> dict[int, list[int]]:
    text = "".join((ROOT / name).read_text() for name in ("LICENSE", "pyproject.toml", "proto/pdserve/v1/worker.proto"))
    token_ids = load_tokenizer(open_model_files(smollm2)).encode(text)
    return {length: token_ids[7 * i : 7 * i + length] for i, length in enumerate(ALL)}


@pytest.fixture(scope="session")
def exact(smollm2: Path, prompts: dict[int, list[int]]) -> Judge:
    return Judge(build_oracle(smollm2), prompts)


async def greedy_through(fleet: Fleet, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    options = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    outputs = await asyncio.gather(*(fleet.generate(prompt, **options) for prompt in prompts))
    return [list(output.token_ids) for output in outputs]


@TOPOLOGIES
async def test_a_few_prompts_equal_transformers(smollm2: Path, exact: Judge, roles: Sequence[str]) -> None:
    budgets = {"prefill": {"token_budget": 64}, "colocated": {"token_budget": 64}}
    async with run_fleet(smollm2, roles, **budgets) as fleet:
        outputs = await greedy_through(fleet, [exact.prompts[length] for length in FEW], 16)
    for length, output in zip(FEW, outputs, strict=True):
        assert output == exact.greedy(length, 16), f"prompt of {length} tokens"


@pytest.mark.slow
@TOPOLOGIES
@pytest.mark.parametrize(("chunk", "num_tokens"), [(16, 16), (64, 16), (512, NUM_TOKENS)])
async def test_every_prompt_equals_transformers_in_fp32(
    smollm2: Path, exact: Judge, roles: Sequence[str], chunk: int, num_tokens: int
) -> None:
    """What chunks change shows at once; long answers are read once."""
    budgets = {"prefill": {"token_budget": chunk}, "colocated": {"token_budget": chunk}}
    async with run_fleet(smollm2, roles, **budgets) as fleet:
        outputs = await greedy_through(fleet, list(exact.prompts.values()), num_tokens)
    assert all(len(output) == num_tokens for output in outputs)
    wrong = [length for length, output in zip(ALL, outputs, strict=True) if output != exact.would_say(length, output)]
    assert not wrong


@dataclass(frozen=True)
class Bf16Trial:
    """The judge on bf16-rounded weights, its greedy tokens by length, and on how many prompts its bf16 twin differs."""

    judge: Judge
    expected: Mapping[int, list[int]]
    num_rival: int


@pytest.fixture(scope="session")
def bf16_trial(smollm2: Path, prompts: dict[int, list[int]]) -> Bf16Trial:
    judge = Judge(build_oracle(smollm2, round_to=torch.bfloat16), prompts)
    rival = Judge(build_oracle(smollm2, round_to=torch.bfloat16, compute=torch.bfloat16), prompts)
    expected = {length: judge.greedy(length, NUM_TOKENS) for length in ALL}
    return Bf16Trial(judge, expected, sum(rival.greedy(n, NUM_TOKENS) != expected[n] for n in ALL))


@pytest.mark.slow
@TOPOLOGIES
async def test_bf16_is_as_faithful_as_transformers_in_bf16(
    smollm2: Path, prompts: dict[int, list[int]], bf16_trial: Bf16Trial, roles: Sequence[str]
) -> None:
    async with run_fleet(smollm2, roles, model={"dtype": "bfloat16"}) as fleet:
        ours = await greedy_through(fleet, list(prompts.values()), NUM_TOKENS)
    num_ours = 0
    for length, output in zip(ALL, ours, strict=True):
        expected = bf16_trial.expected[length]
        if output == expected:
            continue
        num_ours += 1
        at = next(i for i, (a, b) in enumerate(zip(output, expected, strict=True)) if a != b)
        gap = bf16_trial.judge.gap(length, expected[:at], output[at], expected[at])
        assert gap <= MAX_BF16_GAP, f"prompt of {length} tokens, token {at}: {gap}"
    print(f"prompts of {len(ALL)} that differ from fp32: ours {num_ours}, transformers bf16 {bf16_trial.num_rival}")  # noqa: T201
    assert num_ours <= bf16_trial.num_rival


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


@pytest.mark.slow
async def test_32_mixed_requests_a_third_cancelled_each_equal_to_its_run_alone(
    smollm2: Path, prompts: dict[int, list[int]]
) -> None:
    """Disaggregated; the tiny model does the same with 64, in both topologies."""
    rng = random.Random(1)
    text = prompts[2000] + prompts[1025]
    plans: list[tuple[list[int], dict[str, Any], int | None]] = []
    for i in range(32):
        length, start = log_uniform(rng, 5, 3000), rng.randrange(20)
        options = {"max_tokens": log_uniform(rng, 1, 256), "temperature": 0.0, "ignore_eos": True}
        plans.append((text[start : start + length], options, rng.randint(0, 20) if i % 3 == 0 else None))
    async with run_fleet(smollm2, worker={"num_blocks": 4096}) as fleet:

        async def one(prompt: list[int], options: dict[str, Any], cancel_at: int | None) -> Output | None:
            if cancel_at is not None:
                await cancel_after(fleet, prompt, cancel_at, **options)
                return None
            return await fleet.generate(prompt, **options)

        together = await asyncio.gather(*(one(*plan) for plan in plans))
        await fleet.until_idle()
        for plan, output in zip(plans, together, strict=True):
            if output is not None:
                alone = await one(*plan)
                assert alone is not None
                assert (output.token_ids, output.text) == (alone.token_ids, alone.text)
                assert output.finished.finish_reason is FinishReason.LENGTH
