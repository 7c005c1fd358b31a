"""B06 and G01 in real workers around a tiny model: randomness of a request's own, and rows that hold no number."""

import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.core.errors import ErrorReason
from pdserve.engine.runner import ModelRunner
from pdserve.engine.sequence import Chunk, ChunkResult, Sequence
from tests.support.engine_harness import spy_on
from tests.support.real_bench import real_fleet
from tests.support.worker_bench import BenchWorker, Coordinator, Stream

SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 42, "max_tokens": 24, "ignore_eos": True}
MINE = 8
NEIGHBOURS = range(1, 8)


def prompt_of(number: int) -> list[int]:
    return [3 + (number * 31 + i * 7) % 290 for i in range(9 + number)]


async def ask(coordinator: Coordinator, order: Seq[int], **mine: Any) -> dict[int, Stream]:
    """Number 8 is the one looked at; the others have seeds of their own, as the coordinator gives the unseeded."""
    for number in order:
        seed = random.Random(number).getrandbits(64)
        await coordinator.submit(number, prompt_of(number), **(mine if number == MINE else {**SEEDED, "seed": seed}))
    streams = {number: await coordinator.finished(number) for number in order}
    for number, stream in streams.items():
        if stream.error is not None:
            coordinator.cancel(number, prefill=False)  # the half that may still wait for KV
    return streams


async def test_a_seeded_request_is_the_same_in_every_company(tiny_model: Path) -> None:
    """FIELD_CASES B06: alone, among seven, in another order, after a restart, in two workers and in one."""
    shuffled = random.Random(3).sample([*NEIGHBOURS, MINE], 8)
    outputs: list[list[int]] = []
    for order in ([MINE], [*NEIGHBOURS, MINE], shuffled, [MINE]):
        for colocated in (False, True):
            async with real_fleet(tiny_model, colocated=colocated) as coordinator:
                outputs.append((await ask(coordinator, order, **SEEDED))[MINE].output)
    assert len(outputs[0]) == 24
    assert outputs == [outputs[0]] * 8
    async with real_fleet(tiny_model, colocated=False) as coordinator:
        other_seed = await ask(coordinator, [MINE], **{**SEEDED, "seed": 43})
        assert other_seed[MINE].output != outputs[0]


BAD_ROWS: dict[str, Callable[[np.ndarray], None]] = {
    "all NaN": lambda row: row.fill(math.nan),
    "one NaN": lambda row: row.__setitem__(17, math.nan),
    "one +inf": lambda row: row.__setitem__(17, math.inf),
}


def plant(worker: BenchWorker, num_output_tokens: int, spoil: Callable[[np.ndarray], None]) -> None:
    """Spoil the row that number 8's output token `num_output_tokens` is to be drawn from."""
    runner: ModelRunner = worker.runner
    run, spy = runner.run, spy_on(runner)
    sampling: list[Sequence] = []

    def remember(chunks: Seq[Chunk]) -> list[ChunkResult]:
        sampling[:] = [chunk.sequence for chunk in chunks if chunk.sample]
        return run(chunks)

    def spoil_mine(logits: np.ndarray, _rows: list[int]) -> None:
        for row, sequence in zip(logits, sampling, strict=True):
            if sequence.id.sequence == MINE and sequence.num_output_tokens == num_output_tokens:
                spoil(row)

    runner.run = remember  # type: ignore[method-assign]
    spy.alter = spoil_mine


def num_nan_rows(worker: BenchWorker) -> int:
    return sum(service.load().totals.nan_rows for service in worker.worker.services)


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("step", [0, 5])
@pytest.mark.parametrize("kind", BAD_ROWS)
async def test_a_row_that_holds_no_number_is_an_error_and_nobody_elses(
    tiny_model: Path, colocated: bool, step: int, kind: str
) -> None:
    """FIELD_CASES G01: at the prefill token and in mid-decode; greedy, where a sanitised row would yield id 0."""
    fields = {**SEEDED, "temperature": 0.0}
    order = [*NEIGHBOURS, MINE]
    async with real_fleet(tiny_model, colocated=colocated) as coordinator:
        healthy = await ask(coordinator, order, **fields)
    async with real_fleet(tiny_model, colocated=colocated) as coordinator:
        spoilt = coordinator.prefill if step == 0 else coordinator.decode
        plant(spoilt, step, BAD_ROWS[kind])
        streams = await ask(coordinator, order, **fields)
        assert num_nan_rows(spoilt) == 1
    failed = streams.pop(MINE)
    assert failed.error is not None
    assert failed.error.reason is ErrorReason.NUMERICAL_ERROR
    assert failed.output == healthy.pop(MINE).output[:step]
    assert {n: s.output for n, s in streams.items()} == {n: s.output for n, s in healthy.items()}


@pytest.mark.parametrize("colocated", [False, True])
async def test_a_bad_row_among_a_prompts_logprobs_is_an_error_too(tiny_model: Path, colocated: bool) -> None:
    """FIELD_CASES G01: in a chunk that samples nothing."""
    async with real_fleet(tiny_model, colocated=colocated) as coordinator:
        spy = spy_on(coordinator.prefill.runner)
        calls = iter([True])

        def spoil(logits: np.ndarray, _rows: list[int]) -> None:
            if next(calls, False):
                logits[-1] = math.nan

        spy.alter = spoil
        failed = (await ask(coordinator, [MINE], **SEEDED, num_prompt_logprobs=0))[MINE]
        assert failed.error is not None
        assert failed.error.reason is ErrorReason.NUMERICAL_ERROR
        assert failed.output == []
        assert num_nan_rows(coordinator.prefill) == 1
