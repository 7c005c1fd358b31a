"""Plans of the same shape with other token ids, so that no prefix cache knows them from an earlier run. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from random import Random

from pdserve_bench.load.plan import LoadPlan

WARM_UP_TOKENS, WARM_UP_OUTPUT = 256, 8
"""The most that a warm-up's request has."""

SALT = "token_ids_salt"
"""In the `about` of a plan that was relabelled, and of its run."""

_STRIDE = 7919


def relabelled(plan: LoadPlan, salt: int) -> LoadPlan:
    """Each token id is moved by the same amount, round the range of ids that the plan uses. Salt 0 changes nothing.

    Lengths, times and what prompts share stay as they are; small salts of a wide range give plans that all differ.
    """
    low, size = _range(plan)
    if salt == 0 or size < 2:
        return plan
    shift = 1 + salt * _STRIDE % (size - 1)
    requests = (
        replace(request, token_ids=tuple(low + (token_id - low + shift) % size for token_id in request.token_ids))
        for request in plan.requests
    )
    return replace(plan, requests=tuple(requests), about={**plan.about, SALT: salt})


def as_sent(plan: LoadPlan, about: Mapping[str, object]) -> LoadPlan:
    """The plan that was sent in place of `plan`; `about`: the run's."""
    return relabelled(plan, int(str(about.get(SALT, 0))))


def warm_up_plan(plan: LoadPlan, num_requests: int, salt: int) -> LoadPlan:
    """The plan's first requests, all at once, shortened, of random ids of its range that another seed yields."""
    seed = Random(f"warm-up {plan.seed} {salt}").getrandbits(63)
    random = Random(seed)
    low, size = _range(plan)
    requests = (
        replace(
            request,
            at_s=0.0,
            token_ids=tuple(random.choices(range(low, low + size), k=min(WARM_UP_TOKENS, len(request.token_ids)))),
            max_tokens=min(WARM_UP_OUTPUT, request.max_tokens),
            cancel_after_tokens=None,
        )
        for request in plan.requests[:num_requests]
    )
    return LoadPlan(tuple(requests), seed, {"warm-up": True})


def _range(plan: LoadPlan) -> tuple[int, int]:
    """The lowest id, and how many there are up to the highest."""
    low = min((min(request.token_ids) for request in plan.requests if request.token_ids), default=0)
    high = max((max(request.token_ids) for request in plan.requests if request.token_ids), default=0)
    return low, high - low + 1
