"""Sampling, asking for references, and exact comparison, against a client that only writes down what it was asked."""

from collections import Counter

import pytest

from pdserve_bench.load.client import Answer, NoteTokens, RequestError
from pdserve_bench.load.plan import PlannedRequest
from pdserve_bench.load.records import Outcome
from pdserve_bench.measures.outputs import first_difference, pick, reference_outputs, wrong_numbers
from tests.bench.measures.making import record

RECORDS = [
    record(number, events=[(0.1, 1)], request_class="rag" if number % 10 == 0 else "chat") for number in range(40)
] + [record(40, Outcome.FAILED, [(0.1, 1)]), record(41, Outcome.CANCELLED, [(0.1, 1)])]


class _Client:
    """Answers with the prompt's ids; `in_flight` and `most_in_flight` show whether it was asked one at a time."""

    def __init__(self, num_tokens: int = 1, error: RequestError | None = None) -> None:
        self.asked: list[PlannedRequest] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self._num_tokens = num_tokens
        self._error = error

    async def send(self, request: PlannedRequest, note: NoteTokens) -> Answer:
        self.asked.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self._error is not None:
            raise self._error
        if self._num_tokens:
            note(self._num_tokens)
        self.in_flight -= 1
        return Answer("length", self._num_tokens, None, True, " ".join(map(str, request.token_ids)))

    async def close(self) -> None:
        pass


def _request(number: int) -> PlannedRequest:
    return PlannedRequest(number, at_s=100.0, token_ids=(number, 5), max_tokens=4, cancel_after_tokens=1)


def test_a_sample_spreads_over_classes_and_holds_only_completed() -> None:
    sample = pick(RECORDS, 8, seed=1)
    assert Counter(one.request_class for one in sample) == {"chat": 4, "rag": 4}
    assert [one.number for one in sample] == sorted({one.number for one in sample})
    everything = pick(RECORDS, 1000, seed=1)
    assert [one.number for one in everything] == list(range(40))


def test_a_small_class_leaves_its_places_to_the_others() -> None:
    assert Counter(one.request_class for one in pick(RECORDS, 20, seed=1)) == {"chat": 16, "rag": 4}


def test_a_seed_makes_the_same_sample_again_and_another_one_another() -> None:
    assert pick(RECORDS, 8, seed=1) == pick(RECORDS, 8, seed=1)
    assert pick(RECORDS, 8, seed=1) != pick(RECORDS, 8, seed=2)


def test_a_sample_may_be_empty_but_not_negative() -> None:
    assert pick(RECORDS, 0, seed=1) == []
    assert pick([], 5, seed=1) == []
    with pytest.raises(ValueError, match="-1"):
        pick(RECORDS, -1, seed=1)


async def test_references_are_asked_one_at_a_time_in_order_to_their_end() -> None:
    client = _Client()
    assert await reference_outputs(client, [_request(3), _request(1)]) == {3: "3 5", 1: "1 5"}
    assert [request.number for request in client.asked] == [3, 1]
    assert client.most_in_flight == 1
    assert all(request.cancel_after_tokens is None for request in client.asked)


async def test_no_reference_is_made_of_an_answer_without_tokens_or_an_error() -> None:
    with pytest.raises(RequestError, match="request 3 has no tokens"):
        await reference_outputs(_Client(num_tokens=0), [_request(3)])
    with pytest.raises(RequestError, match="gone"):
        await reference_outputs(_Client(error=RequestError("gone")), [_request(3)])


def test_outputs_are_compared_exactly_where_there_is_a_reference() -> None:
    records = [
        record(0, output="7 8 9"),
        record(1, output="7 8 9 "),
        record(2, output="7 8"),
        record(3, output="something else"),
        record(4, Outcome.CANCELLED, output="7"),
    ]
    assert wrong_numbers(records, {0: "7 8 9", 1: "7 8 9", 2: "7 8 9", 4: "7 8 9"}) == frozenset({1, 2})


@pytest.mark.parametrize(
    ("output", "reference", "at"),
    [("abc", "abc", None), ("abc", "abd", 2), ("ab", "abc", 2), ("abc", "ab", 2), ("", "a", 0), ("", "", None)],
)
def test_where_outputs_part(output: str, reference: str, at: int | None) -> None:
    assert first_difference(output, reference) == at
