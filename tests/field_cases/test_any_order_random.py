"""E02, F02, G01: a thousand events in any order on real stages with a prefix cache, faults and expiries among them."""

import random
from collections.abc import Callable

import pytest

from tests.support.workers_by_hand import Workers


def events(workers: Workers, rng: random.Random) -> list[tuple[float, Callable[[], None]]]:
    """How often each comes, and what it does. Prompts over two tokens, mostly one of them: many share a beginning."""

    def number() -> int:
        return rng.randrange(5)

    def often() -> bool:
        return rng.random() < 0.5

    def seldom() -> bool:
        return rng.random() < 0.05

    def reserve() -> None:
        prompt = [rng.choice((1, 1, 1, 2)) for _ in range(rng.randint(1, 9))]
        lasts_s = rng.choice((8.0, 1e6, 1e6))
        workers.reserve(number(), prompt, rng.randint(2, 5), rng.choice(("", "", "x")), seldom(), lasts_s)

    return [
        (3, reserve),
        (3, lambda: workers.submit(number(), rng.randint(0, 8))),
        (1, lambda: workers.submit_decode(number(), wrong=seldom())),
        (1, lambda: workers.submit_prefill(number())),
        (0.4, lambda: workers.cancel(number(), often(), often())),
        (0.6, lambda: workers.heartbeat(rng.randint(1, 2), gone=seldom())),
        (0.6, lambda: workers.reap(rng.choice((0.0, 1.0, 1.0, 6.0)))),
        (0.15, lambda: workers.fault(rng.choice(("nan", "raise")), often())),
        (4, lambda: workers.turn(often(), often())),
        (3, lambda: workers.progress(number(), lost=seldom())),
    ]


@pytest.mark.parametrize("colocated", [False, True], ids=["apart", "colocated"])
@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_tokens_are_right_and_every_block_is_accounted_for(seed: int, colocated: bool) -> None:
    rng, workers = random.Random(seed), Workers(colocated)
    weights, choices = zip(*events(workers, rng), strict=True)
    for event in rng.choices(choices, weights, k=1000):
        event()
        workers.check()
    workers.end()
    assert workers.num_finished > 0
