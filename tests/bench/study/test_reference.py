"""The engine alone tells right outputs from wrong ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve_bench.load.plan import LoadPlan, PlannedRequest
from pdserve_bench.load.records import ClientLimits, Outcome, RequestRecord, RunResult, TokenEvent
from pdserve_bench.study.reference import Reference
from tests.support.engine_harness import build_engine
from tests.support.tiny_models import write_tiny_llama

PROMPTS = [tuple(range(3 + 7 * number, 40 + 9 * number)) for number in range(3)]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), context_length=256)


@pytest.fixture(scope="module")
def reference(source: Path) -> Iterator[Reference]:
    with Reference(source, "float32", max_tokens=256) as reference:
        yield reference


def run_of(outputs: list[list[int]]) -> RunResult:
    records = [
        RequestRecord(
            number=number,
            request_class="default",
            tenant="",
            num_prompt_tokens=len(PROMPTS[number]),
            max_tokens=NUM_TOKENS,
            scheduled_s=0.0,
            outcome=Outcome.COMPLETED,
            sent_s=0.0,
            ended_s=1.0,
            events=(TokenEvent(0.5, NUM_TOKENS),),
            num_output_tokens=NUM_TOKENS,
            num_counted_tokens=NUM_TOKENS,
            output=" ".join(map(str, output)),
        )
        for number, output in enumerate(outputs)
    ]
    return RunResult("made up", {}, 0.0, 1.0, tuple(records), ClientLimits(0, 0, 0, 0, 1))


def test_it_gives_what_the_engine_gives(reference: Reference, source: Path) -> None:
    engine = build_engine(source, "float32")
    for prompt in PROMPTS:
        assert reference.output(prompt, NUM_TOKENS) == engine.generate(list(prompt), NUM_TOKENS)


def test_one_changed_token_is_wrong(reference: Reference) -> None:
    plan = LoadPlan(tuple(PlannedRequest(n, 0.0, prompt, NUM_TOKENS) for n, prompt in enumerate(PROMPTS)), seed=1)
    outputs = [reference.output(prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert set(reference.wrong(plan, run_of(outputs), 3)) == set()
    outputs[1][-1] = (outputs[1][-1] + 1) % 300
    assert set(reference.wrong(plan, run_of(outputs), 3)) == {1}


def test_an_engine_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    with Reference(tmp_path / "nothing") as reference, pytest.raises(RuntimeError, match="ended with exit code"):
        reference.output((1, 2, 3), 2)
