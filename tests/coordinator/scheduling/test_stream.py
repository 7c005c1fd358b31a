import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.stream import MERGE_ABOVE, IndexOrder, TokenStream, UnreadBound
from coordinator.sequences import SequenceEnd, SequenceTimings, TokenDelta
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from pdserve.core.sampling import FinishReason, TokenLogprobs

END = SequenceEnd(FinishReason.STOP, SequenceTimings())


@st.composite
def scrambled(draw: st.DrawFn) -> tuple[int, list[TokenDelta]]:
    """A sequence of n tokens cut into deltas in two different ways, both sent, in any order."""
    num_tokens = draw(st.integers(1, 20))
    deltas: list[TokenDelta] = []
    for _ in range(2):
        cuts = sorted(draw(st.sets(st.integers(1, max(1, num_tokens - 1)))) | {0, num_tokens})
        for begin, end in itertools.pairwise(cuts):
            tokens = tuple(range(begin, end))
            deltas.append(TokenDelta(begin, tokens, tuple(TokenLogprobs(-float(t)) for t in tokens)))
    return num_tokens, draw(st.permutations(deltas))


@given(scrambled())
def test_each_index_is_delivered_once_and_in_order(case: tuple[int, list[TokenDelta]]) -> None:
    num_tokens, deltas = case
    order = IndexOrder(num_tokens)
    delivered: list[int] = []
    for delta in deltas:
        for ready in order.push(delta):
            assert ready.first_index == len(delivered)
            assert [-entry.logprob for entry in ready.logprobs] == list(ready.token_ids)
            delivered.extend(ready.token_ids)
        assert order.next_index == len(delivered)
    assert delivered == list(range(num_tokens))


def test_a_gap_holds_back_what_follows() -> None:
    order = IndexOrder(5)
    assert order.push(TokenDelta(1, (1,))) == []
    assert order.push(TokenDelta(3, (3,))) == []
    assert [d.token_ids for d in order.push(TokenDelta(0, (0,)))] == [(0,), (1,)]
    assert order.next_index == 2


def test_an_impossible_index_is_an_error() -> None:
    with pytest.raises(PdserveError) as caught:
        IndexOrder(5).push(TokenDelta(4, (1, 2)))
    assert caught.value.reason is ErrorReason.INTERNAL


def make(max_unread_tokens: int = 4, grace_s: float = 0.0) -> tuple[TokenStream, list[str]]:
    cancels: list[str] = []
    bound = UnreadBound(max_unread_tokens, grace_s)
    stream = TokenStream(SequenceId(1, 1), bound, lambda: cancels.append("cancel"), SequenceTimings)
    return stream, cancels


async def test_reads_deltas_then_the_end_then_nothing() -> None:
    stream, cancels = make()
    assert stream.deliver(TokenDelta(0, (1, 2)), 0.0)
    stream.finish(END)
    stream.finish(PdserveError(ErrorReason.INTERNAL, "too late"))
    assert [event async for event in stream] == [TokenDelta(0, (1, 2)), END]
    assert [event async for event in stream] == []
    stream.cancel()
    assert cancels == []


async def test_an_error_comes_after_what_is_unread_and_every_time() -> None:
    stream, _ = make()
    stream.deliver(TokenDelta(0, (1,)), 0.0)
    stream.finish(PdserveError(ErrorReason.WORKER_LOST, "gone"))
    assert await anext(aiter(stream)) == TokenDelta(0, (1,))
    for _ in range(2):
        with pytest.raises(PdserveError, match="gone"):
            await anext(aiter(stream))


async def test_a_waiting_reader_wakes() -> None:
    stream, _ = make()
    reading = asyncio.create_task(anext(aiter(stream)))
    await asyncio.sleep(0)
    assert not reading.done()
    stream.deliver(TokenDelta(0, (1,)), 0.0)
    assert await reading == TokenDelta(0, (1,))


@given(st.integers(1, 20), st.lists(st.one_of(st.integers(1, 5), st.none()), max_size=40))
def test_unread_tokens_stay_bounded(bound: int, steps: list[int | None]) -> None:
    async def scenario() -> None:
        stream, _ = make(bound)
        unread: list[int] = []
        for step in steps:
            if step is None:
                if unread:
                    await anext(aiter(stream))
                    del unread[: 1 if len(unread) <= MERGE_ABOVE else None]
            elif stream.deliver(TokenDelta(0, (1,) * step), 0.0):
                unread.append(step)
                assert sum(unread) <= bound or len(unread) == 1
            else:
                assert sum(unread) + step > bound

    asyncio.run(scenario())


async def test_a_burst_is_no_fault_of_the_readers() -> None:
    """Many tokens may arrive before the reader gets a turn; it must have caught up when the grace is over."""
    stream, _ = make(4, grace_s=1.0)
    for index in range(20):
        assert stream.deliver(TokenDelta(index, (index,)), 10.0)
    assert stream.deliver(TokenDelta(20, (20,)), 10.9)
    assert not stream.deliver(TokenDelta(21, (21,)), 11.0)
    assert (await anext(aiter(stream))).token_ids == tuple(range(21))
    for index in range(21, 30):
        assert stream.deliver(TokenDelta(index, (index,)), 12.5)


async def test_a_reader_that_is_behind_gets_all_at_once() -> None:
    stream, _ = make(100)
    entries = [TokenLogprobs(-float(index), ()) for index in range(MERGE_ABOVE + 1)]
    for index, entry in enumerate(entries):
        of_prompt = (entries[3],) if index == 0 else ()
        stream.deliver(TokenDelta(index, (index,), (entry,), of_prompt, num_cached_tokens=7 - 7 * (index > 0)), 0.0)
    merged = await anext(aiter(stream))
    assert merged == TokenDelta(0, tuple(range(MERGE_ABOVE + 1)), tuple(entries), (entries[3],), 7)
    stream.finish(END)
    assert [event async for event in stream] == [END]


async def test_cancel_asks_once_and_drops_what_is_unread() -> None:
    stream, cancels = make()
    stream.deliver(TokenDelta(0, (1,)), 0.0)
    stream.cancel()
    assert cancels == ["cancel"]
    stream.finish(PdserveError(ErrorReason.CANCELLED, "cancelled"))
    with pytest.raises(PdserveError, match="cancelled"):
        await anext(aiter(stream))
