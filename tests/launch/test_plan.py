"""Who gets what of the machine."""

from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.launch.machine import container_limit_bytes, this_machine
from pdserve.launch.plan import (
    MAX_BUDGET_BYTES,
    ChildPlan,
    Machine,
    check_plan,
    plan_coordinator,
    plan_workers,
    share_cores,
)
from pdserve.serving.settings import Settings
from pdserve.serving.settings_loader import load_settings

TWO_CORES = Machine((0, 1), 10 * 1024**3)


def _plans(flags: dict[str, object], machine: Machine = TWO_CORES) -> tuple[ChildPlan, ...]:
    return plan_workers(load_settings(flags, None, {}), machine, "127.0.0.1:50051")


def test_two_workers_on_two_cores_take_one_each() -> None:
    prefill, decode = _plans({})
    assert (prefill.role, prefill.name, prefill.settings.worker.cores) == ("prefill", "prefill-0", (0,))
    assert (decode.role, decode.name, decode.settings.worker.cores) == ("decode", "decode-0", (1,))
    assert decode.settings.worker.worker_id == "decode-0"
    assert decode.environment == {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def test_one_colocated_worker_takes_all_cores() -> None:
    (worker,) = _plans({"launch.mode": "colocated"})
    assert worker.role == worker.name.removesuffix("-0") == "colocated"
    assert worker.settings.worker.cores == (0, 1)
    assert worker.settings.worker.threads == 2
    assert worker.environment["OMP_NUM_THREADS"] == "2"


def test_threads_set_by_hand_are_kept() -> None:
    (worker,) = _plans({"launch.mode": "colocated", "worker.threads": 1})
    assert (worker.settings.worker.cores, worker.settings.worker.threads) == ((0, 1), 1)


def test_cores_set_by_hand_are_what_is_shared() -> None:
    plans = _plans({"worker.cores": "4,6"}, Machine(tuple(range(8)), 1024**3))
    assert [plan.settings.worker.cores for plan in plans] == [(4,), (6,)]


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
    cores = [core for plan in plans for core in plan.settings.worker.cores]
    assert sorted(cores) == list(machine.cores)
    budgets = {plan.settings.worker.memory_budget_bytes for plan in plans}
    assert budgets == {int(0.8 * machine.available_bytes) // 6}


def test_the_coordinator_serves_them_all() -> None:
    settings = load_settings(TWO_MODELS, None, {})
    assert plan_coordinator(settings).settings.models == settings.models


def test_workers_on_a_gpu_take_no_share_of_cores_and_memory() -> None:
    more = '[{"source": "birch", "device": "cuda:1"}]'
    plans = _plans({"model.source": "ash", "more_models": more, "launch.mode": "colocated"})
    on_cpu, on_gpu = plans
    assert (on_cpu.settings.worker.cores, on_cpu.settings.worker.threads) == ((0, 1), 2)
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


@given(st.integers(1, 64), st.integers(1, 80))
def test_shares_of_cores(num_cores: int, num_workers: int) -> None:
    cores = tuple(range(100, 100 + num_cores))
    shares = share_cores(cores, num_workers)
    used = [core for share in shares for core in share]
    assert len(shares) == num_workers
    assert all(shares)
    assert set(used) <= set(cores)
    if num_workers <= num_cores:
        assert sorted(used) == list(cores)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        loads = [used.count(core) for core in cores]
        assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize(
    ("name", "text", "limited"),
    [("memory.max", "1000\n", True), ("memory.max", "max\n", False), ("memory/memory.limit_in_bytes", "1000", True)],
)
def test_a_containers_limit_counts(tmp_path: Path, name: str, text: str, limited: bool) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert container_limit_bytes(tmp_path) == (1000 if limited else psutil.virtual_memory().total)
    assert (this_machine(tmp_path).available_bytes == 1000) == limited
