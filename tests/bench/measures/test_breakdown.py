"""Parts of a run: who is in which, and that failures stay where they belong."""

import pytest

from pdserve_bench.load.records import Outcome
from pdserve_bench.measures.breakdown import (
    bucket,
    by_class,
    by_finish_reason,
    by_output_bucket,
    by_prompt_bucket,
    by_tenant,
)
from pdserve_bench.measures.summary import Slo
from tests.bench.measures.making import record, run_of

RUN = run_of(
    [
        record(0, events=[(0.5, 1)], tenant="a", finish_reason="length", num_prompt_tokens=2049, max_tokens=1),
        record(1, Outcome.FAILED, request_class="rag", tenant="a", num_prompt_tokens=128, max_tokens=600),
        record(2, events=[(2.0, 1)], finish_reason="stop", num_prompt_tokens=129, max_tokens=600),
    ]
)
SLO = Slo(ttft_s=1.0)


@pytest.mark.parametrize(
    ("num_tokens", "name"),
    [
        (0, "0-128"),
        (128, "0-128"),
        (129, "129-512"),
        (512, "129-512"),
        (513, "513-2048"),
        (2048, "513-2048"),
        (2049, "2049+"),
        (10**6, "2049+"),
    ],
)
def test_buckets_hold_their_ends(num_tokens: int, name: str) -> None:
    assert bucket(num_tokens) == name


def test_no_bucket_holds_a_negative_length() -> None:
    with pytest.raises(ValueError, match="-1"):
        bucket(-1)


def test_parts_by_name() -> None:
    assert {name: part.offered for name, part in by_class(RUN, SLO).items()} == {"chat": 2, "rag": 1}
    assert {name: part.failed for name, part in by_tenant(RUN, SLO).items()} == {"": 0, "a": 1}
    assert {name: part.offered for name, part in by_finish_reason(RUN, SLO).items()} == {"": 1, "length": 1, "stop": 1}


def test_buckets_come_shortest_first() -> None:
    prompts = by_prompt_bucket(RUN, SLO)
    assert list(prompts) == ["0-128", "129-512", "2049+"]
    assert [part.ttft.median for part in prompts.values()] == [None, 2.0, 0.5]


def test_a_failed_request_stays_in_the_bucket_of_what_it_asked_for() -> None:
    outputs = by_output_bucket(RUN, SLO)
    assert {name: (part.offered, part.failed) for name, part in outputs.items()} == {
        "0-128": (1, 0),
        "513-2048": (2, 1),
    }


def test_a_part_knows_slo_and_wrong_outputs() -> None:
    parts = by_class(RUN, SLO, wrong={0})
    assert (parts["chat"].num_good, parts["chat"].num_wrong) == (0, 1)
    assert by_class(RUN, SLO)["chat"].goodput == 0.5
