"""Which processes measure what."""

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve_bench.engine.plan import Configuration, Workload, plan_tasks

WORKLOAD = Workload(Path(), "tiny", batches=(1,), contexts=(100,), prompt_lens=(90,), chunks=(16,), num_steps=5)


def test_every_combination_is_a_task_on_as_many_cores_as_threads() -> None:
    tasks = plan_tasks(WORKLOAD, ("bfloat16", "float32"), (1, 2), ("float32",), (4, 6, 7))
    assert [(task.configuration, task.cores) for task in tasks] == [
        (Configuration("bfloat16", 1), (4,)),
        (Configuration("bfloat16", 2), (4, 6)),
        (Configuration("float32", 1), (4,)),
        (Configuration("float32", 2), (4, 6)),
    ]


def test_threads_without_cores_are_refused() -> None:
    with pytest.raises(PdserveError, match="3 threads were asked for, and this process may use 2 cores") as caught:
        plan_tasks(WORKLOAD, ("bfloat16",), (1, 3), ("float32",), (0, 1))
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


def test_the_longest_sequence_must_fit_the_model() -> None:
    assert WORKLOAD.longest == 108
    assert replace(WORKLOAD, prompt_lens=(300,)).longest == 300
    WORKLOAD.check(108)
    with pytest.raises(PdserveError, match="sequences of 108 tokens do not fit the model's context of 107"):
        WORKLOAD.check(107)
