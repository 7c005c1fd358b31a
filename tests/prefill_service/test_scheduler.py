from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.ids import SequenceId
from prefill_service.scheduler import PrefillScheduler


def ident(number: int) -> SequenceId:
    return SequenceId(1, number)


def test_the_budget_is_shared_shortest_first() -> None:
    scheduler = PrefillScheduler(token_budget=100, max_bypasses=8)
    for number, num_tokens in enumerate((300, 20, 50)):
        scheduler.add(ident(number), num_tokens)
    assert scheduler.schedule() == [(ident(1), 20), (ident(2), 50), (ident(0), 30)]
    assert scheduler.schedule() == [(ident(0), 100)]


def test_equal_lengths_go_in_order_of_arrival() -> None:
    scheduler = PrefillScheduler(token_budget=10, max_bypasses=8)
    for number in range(3):
        scheduler.add(ident(number), 10)
    assert [scheduler.schedule()[0][0] for _ in range(3)] == [ident(0), ident(1), ident(2)]


def test_a_long_prompt_is_overtaken_at_most_max_bypasses_times() -> None:
    scheduler = PrefillScheduler(token_budget=10, max_bypasses=8)
    scheduler.add(ident(0), 1000)
    steps = 0
    for number in range(1, 100):
        scheduler.add(ident(number), 10)
        steps += 1
        if scheduler.schedule()[0][0] == ident(0):
            break
    assert steps == 9
    assert scheduler.schedule() == [(ident(0), 10)]  # and once it is first, it stays first


def test_with_no_bypass_allowed_it_is_first_come_first_served() -> None:
    scheduler = PrefillScheduler(token_budget=10, max_bypasses=0)
    scheduler.add(ident(0), 30)
    scheduler.add(ident(1), 5)
    assert [scheduler.schedule() for _ in range(4)] == [
        [(ident(0), 10)],
        [(ident(0), 10)],
        [(ident(0), 10)],
        [(ident(1), 5)],
    ]


def test_a_prompt_that_begins_tells_how_much_is_left_and_the_budget_goes_on() -> None:
    scheduler = PrefillScheduler(token_budget=10, max_bypasses=8)
    for number, num_tokens in enumerate((12, 14, 30)):
        scheduler.add(ident(number), num_tokens)
    asked: list[SequenceId] = []

    def begin(sequence_id: SequenceId) -> int | None:
        asked.append(sequence_id)
        if sequence_id == ident(1):
            scheduler.remove(sequence_id)
            return 0
        return 4 if sequence_id == ident(0) else None

    assert scheduler.schedule(begin) == [(ident(0), 4), (ident(2), 6)]
    assert scheduler.schedule(begin) == [(ident(2), 10)]
    assert asked == [ident(0), ident(1), ident(2)]
    assert (len(scheduler), scheduler.num_queued_tokens) == (1, 14)


def test_removed_prompts_get_nothing() -> None:
    scheduler = PrefillScheduler(token_budget=10, max_bypasses=8)
    scheduler.add(ident(0), 30)
    assert scheduler.remove(ident(0))
    assert not scheduler.remove(ident(0))
    assert scheduler.schedule() == []


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=20),
    st.integers(1, 64),
    st.integers(0, 4),
)
def test_every_token_of_every_prompt_is_scheduled_once_within_budget(
    lengths: list[int], budget: int, max_bypasses: int
) -> None:
    scheduler = PrefillScheduler(budget, max_bypasses)
    for number, num_tokens in enumerate(lengths):
        scheduler.add(ident(number), num_tokens)
    done = [0] * len(lengths)
    while len(scheduler):
        before = scheduler.num_queued_tokens
        chosen = scheduler.schedule()
        spent = sum(num_tokens for _, num_tokens in chosen)
        assert spent == min(budget, before)  # no budget is wasted while anything waits
        assert all(num_tokens > 0 for _, num_tokens in chosen)
        for sequence_id, num_tokens in chosen:
            done[sequence_id.sequence] += num_tokens
    assert done == lengths


@given(st.lists(st.tuples(st.integers(1, 100), st.booleans()), min_size=1, max_size=60), st.integers(0, 5))
def test_nobody_is_bypassed_more_often_than_allowed(arrivals: list[tuple[int, bool]], max_bypasses: int) -> None:
    scheduler = PrefillScheduler(16, max_bypasses)
    waiting: set[int] = set()
    bypasses: dict[int, int] = {}
    for number, (num_tokens, step) in enumerate(arrivals):
        scheduler.add(ident(number), num_tokens)
        waiting.add(number)
        bypasses[number] = 0
        if not step:
            continue
        served = {sequence_id.sequence for sequence_id, _ in scheduler.schedule()}
        for n in waiting:
            bypasses[n] += n not in served and any(s > n for s in served)
        waiting = {n for n in waiting if scheduler.waits(ident(n))}
    assert max(bypasses.values()) <= max_bypasses
