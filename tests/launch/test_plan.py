"""Who gets what of the machine."""

import math
from dataclasses import replace

import pytest

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.launch.placement import Cpu
from pdserve.launch.plan import (
    MAX_BUDGET_BYTES,
    ChildPlan,
    Machine,
    check_plan,
    plan_coordinator,
    plan_workers,
    sharing_warning,
)
from pdserve.launch.roles import thread_environment
from pdserve.serving.settings import Settings
from pdserve.serving.settings_loader import load_settings

TWO_CORES = Machine((0, 1), 10 * 1024**3)


def _plans(flags: dict[str, object], machine: Machine = TWO_CORES) -> tuple[ChildPlan, ...]:
    return plan_workers(load_settings(flags, None, {}), machine, "127.0.0.1:50051")


def test_two_workers_on_two_cores_take_one_each_decode_first() -> None:
    prefill, decode = _plans({})
    assert (prefill.role, prefill.name, prefill.settings.worker.cores) == ("prefill", "prefill-0", (1,))
    assert (decode.role, decode.name, decode.settings.worker.cores) == ("decode", "decode-0", (0,))
    assert decode.settings.worker.worker_id == "decode-0"
    assert decode.environment == thread_environment(1)


@pytest.mark.parametrize(("threads", "cores"), [(1, (0,)), (2, (0, 1)), (3, (0, 1))])
def test_a_worker_takes_as_many_cores_as_it_has_threads(threads: int, cores: tuple[int, ...]) -> None:
    (worker,) = _plans({"launch.mode": "colocated", "worker.threads": threads})
    assert worker.role == worker.name.removesuffix("-0") == "colocated"
    assert (worker.settings.worker.cores, worker.settings.worker.threads) == (cores, threads)
    assert worker.environment == thread_environment(threads)


def test_cores_set_by_hand_are_what_is_shared() -> None:
    plans = _plans({"worker.cores": "4,6"}, Machine(tuple(range(8)), 1024**3))
    assert [plan.settings.worker.cores for plan in plans] == [(6,), (4,)]


def test_whole_cores_are_shared_before_siblings() -> None:
    topology = {core: Cpu(core, core // 2) for core in range(4)}
    plans = _plans({}, Machine(tuple(range(4)), 1024**3, topology))
    assert [plan.settings.worker.cores for plan in plans] == [(2,), (0,)]


@pytest.mark.parametrize(
    ("flags", "quota", "warned"),
    [
        ({}, math.inf, False),
        ({"worker.threads": 2}, math.inf, True),
        ({"launch.decode": 2}, math.inf, True),
        ({"worker.cores": "1"}, math.inf, True),
        ({}, 1.5, True),
        ({"launch.decode": 2, "model.device": "cuda"}, math.inf, False),
    ],
)
def test_more_threads_than_cores_are_a_warning(flags: dict[str, object], quota: float, warned: bool) -> None:
    machine = replace(TWO_CORES, cpu_quota=quota)
    assert bool(sharing_warning(load_settings(flags, None, {}), machine)) is warned


def test_without_pinning_or_on_a_gpu_nobody_is_pinned() -> None:
    for flags in ({"launch.pin": "false"}, {"model.device": "cuda"}):
        assert all(plan.settings.worker.cores == () and plan.settings.worker.threads == 1 for plan in _plans(flags))
    assert _plans({"model.device": "cuda"})[0].environment == {}


def test_memory_is_divided_and_capped() -> None:
    budgets = [plan.settings.worker.memory_budget_bytes for plan in _plans({"launch.decode": 2})]
    assert budgets == [int(0.8 * TWO_CORES.available_bytes) // 3] * 3
    roomy = _plans({}, Machine((0, 1), 1024**4))
    assert {plan.settings.worker.memory_budget_bytes for plan in roomy} == {MAX_BUDGET_BYTES}
    assert _plans({"worker.memory_budget_bytes": 7})[0].settings.worker.memory_budget_bytes == 7


TWO_MODELS: dict[str, object] = {
    "model.source": "/m/ash",
    "more_models": '[{"source": "org/birch", "dtype": "float32"}]',
}


def test_every_model_gets_workers_of_its_own() -> None:
    machine = Machine(tuple(range(8)), 10 * 1024**3)
    plans = _plans({**TWO_MODELS, "launch.decode": 2}, machine)
    assert [plan.name for plan in plans] == [
        "ash.prefill-0",
        "ash.decode-0",
        "ash.decode-1",
        "org/birch.prefill-0",
        "org/birch.decode-0",
        "org/birch.decode-1",
    ]
    assert [plan.role for plan in plans] == ["prefill", "decode", "decode"] * 2
    for plan in plans:
        assert plan.settings.worker.worker_id == plan.name
        assert [model.name for model in plan.settings.models] == [plan.name.rpartition(".")[0]]
    assert {plan.settings.model.dtype for plan in plans[3:]} == {"float32"}
    cores = [plan.settings.worker.cores for plan in plans]
    assert cores == [(4,), (0,), (1,), (5,), (2,), (3,)]
    budgets = {plan.settings.worker.memory_budget_bytes for plan in plans}
    assert budgets == {int(0.8 * machine.available_bytes) // 6}


def test_the_coordinator_serves_them_all() -> None:
    settings = load_settings(TWO_MODELS, None, {})
    assert plan_coordinator(settings).settings.models == settings.models


def test_workers_on_a_gpu_take_no_share_of_cores_and_memory() -> None:
    more = '[{"source": "birch", "device": "cuda:1"}]'
    plans = _plans({"model.source": "ash", "more_models": more, "launch.mode": "colocated"})
    on_cpu, on_gpu = plans
    assert on_cpu.settings.worker.cores == (0,)
    assert on_cpu.settings.worker.memory_budget_bytes == MAX_BUDGET_BYTES
    assert (on_gpu.settings.worker.cores, on_gpu.settings.worker.memory_budget_bytes, on_gpu.environment) == ((), 0, {})


def test_one_colocated_worker_of_each_of_two_models_is_two_workers() -> None:
    with pytest.raises(PdserveError, match=r"worker\.worker_id"):
        check_plan(
            load_settings({**TWO_MODELS, "launch.mode": "colocated", "worker.worker_id": "w"}, None, {}), TWO_CORES
        )


def test_the_own_coordinator_comes_first() -> None:
    (plan, _) = _plans({"worker.coordinators": "other:1"})
    assert plan.settings.worker.coordinators == ("127.0.0.1:50051", "other:1")


def test_the_coordinator_gets_the_settings_as_they_are() -> None:
    settings = Settings()
    assert plan_coordinator(settings) == ChildPlan("coordinator", "coordinator", settings)


@pytest.mark.parametrize(
    "flags",
    [{"worker.control_port": 7}, {"worker.kv_port": 7}, {"worker.worker_id": "w"}, {"worker.cores": "5"}],
    ids=lambda flags: next(iter(flags)),
)
def test_what_workers_cannot_share_is_refused_by_name(flags: dict[str, object]) -> None:
    with pytest.raises(PdserveError, match=next(iter(flags))) as caught:
        check_plan(load_settings(flags, None, {}), TWO_CORES)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    if "worker.cores" not in flags:
        check_plan(load_settings({**flags, "launch.mode": "colocated"}, None, {}), TWO_CORES)
