"""What clients get from a fleet of real processes, whatever runs beside them."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.sampling import FinishReason
from tests.support.fleet import COLOCATED, DISAGGREGATED, Output, cancel_after, run_fleet
from tests.support.oracle import build_oracle, oracle_greedy

VOCAB = 300
TOPOLOGIES = pytest.mark.parametrize("roles", [DISAGGREGATED, COLOCATED], ids=["disaggregated", "colocated"])


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


@TOPOLOGIES
async def test_64_mixed_requests_a_third_cancelled_each_equal_to_its_run_alone(
    tiny_model: Path, roles: Sequence[str]
) -> None:
    rng = random.Random(0)
    requests = [
        (prompt_of(rng.choice([rng.randint(5, 64), rng.randint(64, 600), rng.randint(600, 3000)]), seed=i), rng)
        for i in range(64)
    ]
    plans = [
        (prompt, rng.randint(1, 256), rng.randint(0, 40) if i % 3 == 0 else None)
        for i, (prompt, rng) in enumerate(requests)
    ]
    async with run_fleet(tiny_model, roles, worker={"num_blocks": 2048}) as fleet:

        async def one(prompt: list[int], max_tokens: int, cancel_at: int | None) -> Output | None:
            options = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
            if cancel_at is not None:
                await cancel_after(fleet, prompt, cancel_at, **options)
                return None
            return await fleet.generate(prompt, **options)

        together = await asyncio.gather(*(one(*plan) for plan in plans))
        status = await fleet.until_idle()
        for (prompt, max_tokens, cancel_at), output in zip(plans, together, strict=True):
            if output is None:
                continue
            alone = await one(prompt, max_tokens, cancel_at)
            assert alone is not None
            assert output.token_ids == alone.token_ids
            assert output.text == alone.text
            assert len(output.token_ids) == max_tokens
            assert output.finished.finish_reason is FinishReason.LENGTH
        assert all(w.load.totals.preemptions == 0 for pool in status.pools for w in pool.workers)


@TOPOLOGIES
@pytest.mark.parametrize("chunk", [16, 24, 64])
async def test_tokens_equal_transformers_around_block_and_chunk_edges(
    tiny_model: Path, roles: Sequence[str], chunk: int
) -> None:
    """E06, G03 and, in fp32, the judge's rule on a model small enough for every edge."""
    oracle = build_oracle(tiny_model)
    budgets = {"prefill": {"token_budget": chunk}, "colocated": {"token_budget": chunk}}
    lengths = {1, 2, 15, 16, 17, 31, 32, 33, chunk - 1, chunk, chunk + 1, 3 * chunk + 7, 200}
    async with run_fleet(tiny_model, roles, **budgets) as fleet:

        async def one(length: int) -> None:
            prompt = prompt_of(length, seed=length)
            output = await fleet.generate(prompt, max_tokens=20, temperature=0.0, ignore_eos=True)
            assert list(output.token_ids) == oracle_greedy(oracle, prompt, 20), f"prompt of {length} tokens"

        await asyncio.gather(*(one(length) for length in sorted(lengths)))


async def test_a_key_in_a_chunk_that_is_not_the_last_survives_the_transfer(tiny_model: Path) -> None:
    """E11: chunks leave while later ones compute; what decode reads must be what prefill wrote."""
    oracle = build_oracle(tiny_model)
    prompts = [prompt_of(300 + 37 * i, seed=i) for i in range(10)]
    for chunk in (64, 256):
        async with run_fleet(tiny_model, prefill={"token_budget": chunk}) as fleet:
            outputs = await asyncio.gather(
                *(fleet.generate(prompt, max_tokens=16, temperature=0.0, ignore_eos=True) for prompt in prompts)
            )
        for prompt, output in zip(prompts, outputs, strict=True):
            assert list(output.token_ids) == oracle_greedy(oracle, prompt, 16)


async def test_a_seed_fixes_the_tokens_whatever_the_neighbours_and_the_topology(tiny_model: Path) -> None:
    """B06."""
    prompt = prompt_of(40, seed=1)
    options = {"max_tokens": 32, "temperature": 0.8, "seed": 42, "ignore_eos": True}
    seen: list[tuple[int, ...]] = []
    for roles in (DISAGGREGATED, COLOCATED):
        async with run_fleet(tiny_model, roles) as fleet:
            seen.append((await fleet.generate(prompt, **options)).token_ids)
            neighbours = [
                asyncio.ensure_future(fleet.generate(prompt_of(30 + i, i), max_tokens=32, temperature=1.0))
                for i in range(7)
            ]
            seen.append((await fleet.generate(prompt, **options)).token_ids)
            await asyncio.gather(*neighbours)
            one, two = [await fleet.generate(prompt, max_tokens=32, temperature=0.8) for _ in range(2)]
            assert one.token_ids != two.token_ids
    assert len(set(seen)) == 1


@TOPOLOGIES
async def test_what_fits_exactly_runs_and_one_block_more_is_refused(tiny_model: Path, roles: Sequence[str]) -> None:
    """I02, E03."""
    async with run_fleet(tiny_model, roles, worker={"num_blocks": 8}) as fleet:
        prompt = prompt_of(100, seed=1)
        output = await fleet.generate(prompt, max_tokens=28, temperature=0.0, ignore_eos=True)
        assert len(output.token_ids) == 28
        with pytest.raises(PdserveError) as refused:
            await fleet.generate(prompt, max_tokens=29, temperature=0.0)
        assert refused.value.reason is ErrorReason.NEVER_FITS
        behind = await fleet.generate(prompt_of(5, seed=2), max_tokens=3, temperature=0.0, ignore_eos=True)
        assert len(behind.token_ids) == 3


async def test_two_that_do_not_fit_together_both_finish(tiny_model: Path) -> None:
    """E03: one waits for the other, and nobody is preempted."""
    async with run_fleet(tiny_model, worker={"num_blocks": 10}) as fleet:
        outputs = await asyncio.gather(
            *(fleet.generate(prompt_of(64, i), max_tokens=32, temperature=0.0, ignore_eos=True) for i in range(5))
        )
        assert [len(output.token_ids) for output in outputs] == [32] * 5


async def test_two_requests_under_one_label_are_two_requests(tiny_model: Path) -> None:
    async with run_fleet(tiny_model) as fleet:
        options = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
        prompts = [prompt_of(50, 1), prompt_of(60, 2)]
        alone = [await fleet.generate(prompt, **options) for prompt in prompts]
        together = await asyncio.gather(*(fleet.generate(prompt, label="same", **options) for prompt in prompts))
        assert [o.token_ids for o in together] == [o.token_ids for o in alone]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_max_tokens_is_exact(tiny_model: Path, max_tokens: int) -> None:
    async with run_fleet(tiny_model) as fleet:
        output = await fleet.generate(prompt_of(20, 1), max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        assert len(output.token_ids) == max_tokens
        status = await fleet.until_idle()
        moved = sum(w.load.totals.transferred_bytes for pool in status.pools for w in pool.workers)
        assert (moved == 0) == (max_tokens == 1)
