"""The memory plan: whole blocks within the budget, or a refusal with the numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_info import KvLayout
from pdserve.engine.memory import MemoryLimits, MemoryNeeds, plan_memory, render_plan

LAYOUT = KvLayout("bfloat16", block_size=16, num_layers=2, num_kv_heads=2, head_dim=16)
NEEDS = MemoryNeeds(weights=1000, workspace=200, transfer_buffers=30, runtime=4)


@given(st.integers(0, 10_000_000), st.floats(0, 0.89), st.integers(1, 4096))
def test_the_plan_fills_the_budget_and_stays_within_it(budget, headroom, context_length):
    limits = MemoryLimits(budget, headroom)
    room = budget - int(budget * headroom) - NEEDS.total
    if room < LAYOUT.block_bytes:
        with pytest.raises(PdserveError) as caught:
            plan_memory(limits, NEEDS, LAYOUT, context_length)
        assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
        assert caught.value.param == "memory_budget_bytes"
        enough = int(caught.value.message.split()[-1])
        assert plan_memory(MemoryLimits(enough, headroom), NEEDS, LAYOUT, context_length).num_blocks == 1
        return
    plan = plan_memory(limits, NEEDS, LAYOUT, context_length)
    assert plan.kv_cache == plan.num_blocks * LAYOUT.block_bytes
    assert plan.total + plan.headroom <= budget < plan.total + plan.headroom + LAYOUT.block_bytes


def test_a_given_number_of_blocks_is_taken():
    plan = plan_memory(MemoryLimits(0, 0.1, num_blocks=7), NEEDS, LAYOUT, 64)
    assert (plan.num_blocks, plan.kv_cache) == (7, 7 * LAYOUT.block_bytes)


@pytest.mark.parametrize(("num_blocks", "warned"), [(15, True), (16, False)])
def test_fewer_than_four_longest_requests_warn(num_blocks, warned):
    plan = plan_memory(MemoryLimits(0, 0.1, num_blocks), NEEDS, LAYOUT, 60)
    assert bool(plan.warning) is warned
    if warned:
        assert "3.8 requests of 60 tokens" in plan.warning


@pytest.mark.parametrize(("num_blocks", "refuses"), [(3, True), (4, False)])
def test_a_pool_below_one_longest_request_warns_with_the_true_limit(num_blocks, refuses):
    plan = plan_memory(MemoryLimits(0, 0.1, num_blocks), NEEDS, LAYOUT, 60)
    assert ("requests of more than 48 tokens (prompt + max_tokens) are refused" in plan.warning) is refuses
    assert ("will queue" in plan.warning) is not refuses


def test_the_table_shows_predicted_beside_measured():
    plan = plan_memory(MemoryLimits(1 << 30, 0.25), MemoryNeeds(100 << 20, 50 << 20, 8 << 20, 210 << 20), LAYOUT, 64)
    lines = render_plan(plan, {"weights": 101 << 20, "total": 700 << 20}).splitlines()
    rows = {line[:18].strip(): line[18:].split() for line in lines}
    assert rows["weights"] == ["100.0", "MiB", "101.0", "MiB"]
    assert rows["headroom"] == ["256.0", "MiB", "–"]
    assert rows["budget"] == ["1,024.0", "MiB", "–"]
    assert rows["KV cache"][-1] == "–"
    assert f"{plan.num_blocks} KV blocks of 16 tokens" in lines[-1]
