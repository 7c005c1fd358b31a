"""Which colocated fleet is the baseline: the best at the SLO, and why, in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_bench.compare.candidates import CHUNKS, TIE, Candidate, best, candidates
from pdserve_bench.measures.summary import Summary
from tests.bench.compare.summaries import summary_with

WIDE, NARROW, OTHER = Candidate(1, 2, 128), Candidate(2, 1, 64), Candidate(1, 2, 512)


def test_both_shapes_at_every_chunk() -> None:
    found = candidates()
    assert len(found) == 2 * len(CHUNKS)
    assert {(one.num_workers, one.num_threads) for one in found} == {(1, 2), (2, 1)}
    assert {one.chunk for one in found} == {32, 64, 128, 256, 512}
    assert [(one.num_workers, one.num_threads) for one in candidates([32], num_cores=1)] == [(1, 1)]
    assert [str(one) for one in candidates([32])] == [
        "one engine of 2 threads, chunk 32",
        "2 replicas of one thread, chunk 32",
    ]


@pytest.mark.parametrize(("chunks", "num_cores"), [([], 2), ([0, 32], 2), ([32], 0)])
def test_nothing_to_try_is_refused(chunks: list[int], num_cores: int) -> None:
    with pytest.raises(ValueError, match="nothing to try"):
        candidates(chunks, num_cores)
    with pytest.raises(ValueError, match="no candidate"):
        best({})


def test_the_highest_goodput_wins_whatever_its_latencies() -> None:
    choice = best({WIDE: summary_with(0.8, itl_s=0.09), NARROW: summary_with(0.5, itl_s=0.01)})
    assert choice.candidate == WIDE
    assert choice.why == (
        "one engine of 2 threads, chunk 128: highest goodput, 80.0% of offered requests against 50.0% of the next"
    )


def test_among_equals_the_calmest_streams_win_and_then_the_first_tokens() -> None:
    calm = best({WIDE: summary_with(0.80, itl_s=0.09), NARROW: summary_with(0.79, itl_s=0.06)})
    assert calm.candidate == NARROW
    assert "lowest p99 ITL of them, 60 ms" in calm.why
    soon = best({WIDE: summary_with(0.8, 0.060, 2.0), NARROW: summary_with(0.8, 0.071, 1.0), OTHER: summary_with(0.1)})
    assert soon.candidate == NARROW
    assert "lowest p99 TTFT of those, 1000 ms" in soon.why


def test_one_that_completed_nothing_is_never_calm() -> None:
    dead = summary_with(0.0, None, None)
    assert best({WIDE: dead, NARROW: summary_with(0.0, 0.5, 9.0)}).candidate == NARROW
    assert "none measured" in best({WIDE: dead, NARROW: dead}).why


SUMMARIES = st.builds(
    summary_with,
    st.sampled_from([0.0, 0.49, 0.495, 0.5, 1.0]),
    st.sampled_from([None, 0.05, 0.0505, 0.06]),
    st.sampled_from([None, 1.0, 2.0]),
)


@given(st.dictionaries(st.sampled_from(candidates()), SUMMARIES, min_size=1))
def test_the_choice_is_near_the_top_and_knows_no_order(results: dict[Candidate, Summary]) -> None:
    choice = best(results)
    assert results[choice.candidate].goodput >= (1 - TIE) * max(one.goodput for one in results.values())
    assert choice.why.startswith(str(choice.candidate))
    assert best(dict(reversed(results.items()))).candidate == choice.candidate
