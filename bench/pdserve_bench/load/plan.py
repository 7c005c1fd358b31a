"""What a run will send and when, all of it fixed before it begins. Sends nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request. `at_s`: when to send it, from the run's begin, whatever became of those before it.

    `cancel_after_tokens`: the client hangs up once so many output tokens are there; None: never.
    """

    number: int
    at_s: float
    token_ids: tuple[int, ...]
    max_tokens: int
    request_class: str = "default"
    tenant: str = ""
    cancel_after_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Requests by rising `at_s`. `seed` and `about` (arrivals, mix, trace, rate…, as JSON) are enough to make it anew.

    `intended_hit_rate`: share of prompt tokens that an ideal prefix cache, empty at first, would find; 0 where every
    prompt is fresh.
    """

    requests: tuple[PlannedRequest, ...]
    seed: int
    about: Mapping[str, object] = field(default_factory=dict[str, object])
    intended_hit_rate: float = 0.0

    @property
    def span_s(self) -> float:
        """From the run's begin to the last arrival."""
        return self.requests[-1].at_s if self.requests else 0.0
