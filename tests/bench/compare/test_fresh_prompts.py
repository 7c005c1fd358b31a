"""Plans that no prefix cache knows: of the same shape as the one they stand for, with other ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_bench.compare.fresh_prompts import (
    WARM_UP_OUTPUT,
    WARM_UP_TOKENS,
    as_sent,
    relabelled,
    warm_up_plan,
)
from pdserve_bench.load.plan import LoadPlan, PlannedRequest

PROMPTS = st.lists(st.lists(st.integers(0, 50_000), max_size=8).map(tuple), min_size=1, max_size=5)


def plan_of(prompts: list[tuple[int, ...]]) -> LoadPlan:
    requests = (PlannedRequest(number, number / 10, ids, 4, "chat", "t") for number, ids in enumerate(prompts))
    return LoadPlan(tuple(requests), 7, {"mix": "m"}, 0.25)


def ids_of(plan: LoadPlan) -> list[int]:
    return [token_id for request in plan.requests for token_id in request.token_ids]


@given(PROMPTS, st.integers(0, 9))
def test_the_shape_stays_and_equal_ids_stay_equal(prompts: list[tuple[int, ...]], salt: int) -> None:
    plan = plan_of(prompts)
    other = relabelled(plan, salt)
    assert [len(request.token_ids) for request in other.requests] == [len(ids) for ids in prompts]
    assert [request.at_s for request in other.requests] == [request.at_s for request in plan.requests]
    assert other.intended_hit_rate == plan.intended_hit_rate
    before, after = ids_of(plan), ids_of(other)
    assert len(set(zip(before, after, strict=True))) == len(set(before)) == len(set(after))
    if before:
        assert min(before) <= min(after)
        assert max(after) <= max(before)
    assert as_sent(plan, other.about) == other


def test_every_id_moves_and_each_salt_moves_it_elsewhere() -> None:
    plan = plan_of([(256, 300, 4000), (256, 300, 49_151)])
    assert relabelled(plan, 0) is plan
    others = [ids_of(relabelled(plan, salt)) for salt in range(5)]
    for position in range(6):
        assert len({ids[position] for ids in others}) == 5


def test_ids_of_a_single_value_stay() -> None:
    plan = plan_of([(5, 5), (5,)])
    assert relabelled(plan, 3) is plan


@given(PROMPTS, st.integers(0, 3))
def test_a_warm_up_is_short_at_once_and_of_the_plans_range(prompts: list[tuple[int, ...]], salt: int) -> None:
    plan = plan_of(prompts)
    warm_up = warm_up_plan(plan, 3, salt)
    assert len(warm_up.requests) == min(3, len(prompts))
    for ours, theirs in zip(warm_up.requests, plan.requests, strict=False):
        assert ours.at_s == 0.0
        assert len(ours.token_ids) == len(theirs.token_ids)
        assert (ours.request_class, ours.tenant) == (theirs.request_class, theirs.tenant)
    if ids := ids_of(warm_up):
        assert min(ids_of(plan)) <= min(ids)
        assert max(ids) <= max(ids_of(plan))


def test_a_warm_up_has_other_prompts_whatever_the_plan() -> None:
    long = plan_of([tuple(range(100, 600)), tuple(range(100, 140))])
    warm_ups = [warm_up_plan(long, 2, salt) for salt in (0, 1)]
    assert [len(request.token_ids) for request in warm_ups[0].requests] == [WARM_UP_TOKENS, 40]
    assert all(request.max_tokens <= WARM_UP_OUTPUT for request in warm_ups[0].requests)
    prompts = {request.token_ids[:16] for plan in [*warm_ups, long] for request in plan.requests}
    assert len(prompts) == 5  # those of `long` begin alike
    assert warm_up_plan(long, 2, 0) == warm_ups[0]


def test_a_salt_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        as_sent(plan_of([(1, 2)]), {"token_ids_salt": "x"})
