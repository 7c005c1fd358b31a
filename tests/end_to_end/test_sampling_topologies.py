"""Every sampling parameter in real workers around a tiny model: two workers, one, and a slow reference agree."""

from pathlib import Path
from typing import Any

import pytest

from pdserve.core.sampling import SamplingParams
from pdserve_kernels.host import why_not_here
from tests.support.engine_harness import Engine, build_engine
from tests.support.real_bench import real_fleet
from tests.support.sampler_oracle import slow_sample
from tests.support.tiny_models import EOS_TOKEN_ID
from tests.support.worker_bench import Coordinator, Stream

PROMPT = [5, 9, 5, 7, 200, 31, 77, 9, 120, 64, 5]
NUM_TOKENS = 24
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.3},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "presence": {"presence_penalty": 2.0, "temperature": 0.2},
    "frequency": {"frequency_penalty": -1.5, "temperature": 0.2},
    "repetition": {"repetition_penalty": 3.0, "temperature": 0.2},
    "logit_bias": {"logit_bias": {5: -100.0, 77: 4.0}},
    "min_tokens": {"min_tokens": 20, "logit_bias": {EOS_TOKEN_ID: 100.0}, "ignore_eos": False},
    "stop_token_ids": {"stop_token_ids": frozenset(range(100, 140)), "min_tokens": 3},
    "choice": {"choice": 2},
    "seed": {"seed": 2**64 - 1},
    "all": {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "choice": 1},
}
"""What each asks for; the rest is the same for all."""


def sampling(fields: dict[str, Any]) -> SamplingParams:
    common = {"max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 42, "ignore_eos": True}
    return SamplingParams(**{**common, "num_logprobs": 2, "num_prompt_logprobs": 2, **fields})


def told(stream: Stream) -> object:
    return stream.output, stream.finish_reason, stream.logprobs, stream.prompt_logprobs


async def answers(coordinator: Coordinator) -> dict[str, Stream]:
    """Of all of PARAMETERS, a few at a time, as the pool holds them."""
    streams: dict[str, Stream] = {}
    numbered = list(enumerate(PARAMETERS.items(), start=1))
    for group in (numbered[:8], numbered[8:]):
        for number, (name, fields) in group:
            params = {field: getattr(sampling(fields), field) for field in SamplingParams.__slots__}
            streams[name] = await coordinator.submit(number, PROMPT, **params)
        for number, _ in group:
            await coordinator.finished(number)
    return streams


def reference(engine: Engine, params: SamplingParams) -> list[int]:
    """Tokens of one process alone, each drawn by the slow sampler."""
    engine.next_block = 1
    sequence = engine.sequence(PROMPT, params)
    output: list[int] = []
    while len(output) < params.max_tokens:
        logits = engine.step((sequence, sequence.num_remaining_tokens))[0]
        token = slow_sample(logits.tolist(), params, [*PROMPT, *output], len(PROMPT), [EOS_TOKEN_ID])
        assert token is not None
        output.append(token)
        sequence.token_ids[len(PROMPT) :] = output
        if token in params.stop_token_ids or (token == EOS_TOKEN_ID and not params.ignore_eos):
            break
    return output


async def test_two_workers_one_and_the_slow_reference_agree(tiny_model: Path) -> None:
    async with real_fleet(tiny_model, colocated=False) as coordinator:
        apart = await answers(coordinator)
    async with real_fleet(tiny_model, colocated=True) as coordinator:
        together = await answers(coordinator)
    engine = build_engine(tiny_model)
    for name, fields in PARAMETERS.items():
        assert apart[name].output == reference(engine, sampling(fields)), name
        assert told(apart[name]) == told(together[name]), name
        assert len(apart[name].logprobs) == len(apart[name].output)
        assert len(apart[name].prompt_logprobs) == len(PROMPT) - 1
    assert len({tuple(stream.output) for stream in apart.values()}) == len(PARAMETERS), "two parameters did the same"
    assert apart["min_tokens"].output[-1] == EOS_TOKEN_ID
    assert len(apart["min_tokens"].output) == 21


async def cold_and_warm(coordinator: Coordinator) -> tuple[list[Stream], list[Stream]]:
    """Six prompts at once, and all of them again in another order: the second time their blocks are cached."""
    rounds: list[list[Stream]] = []
    for first, order in ((1, 1), (11, -1)):
        streams: dict[int, Stream] = {}
        for prompt in list(range(6))[::order]:
            ids = [3 + (prompt * 31 + 7 * at) % 290 for at in range(10 + 4 * prompt)]
            streams[prompt] = await coordinator.submit(
                first + prompt, ids, max_tokens=12, temperature=0.9, seed=prompt, num_logprobs=20, ignore_eos=True
            )
        for prompt in streams:
            await coordinator.finished(first + prompt)
        await coordinator.prefill.until_empty()
        await coordinator.decode.until_empty()
        rounds.append([streams[prompt] for prompt in sorted(streams)])
    return rounds[0], rounds[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_neither_topology_nor_a_warm_prefix_changes_a_token_or_a_logprob(tiny_model: Path, dtype: str) -> None:
    """On native kernels wherever they run."""
    async with real_fleet(tiny_model, colocated=False, dtype=dtype) as coordinator:
        apart = await cold_and_warm(coordinator)
    async with real_fleet(tiny_model, colocated=True, token_budget=11, dtype=dtype) as coordinator:
        together = await cold_and_warm(coordinator)
    expected = [told(stream) for stream in apart[0]]
    for cold, warm in (apart, together):
        assert [told(stream) for stream in cold] == expected
        assert [told(stream) for stream in warm] == expected
        assert [stream.num_cached_tokens for stream in cold] == [0] * 6
        assert all(stream.num_cached_tokens >= 8 for stream in warm)
    native = build_engine(tiny_model, dtype).model.numerics_version.startswith("cpu-")
    assert native is not bool(why_not_here())
