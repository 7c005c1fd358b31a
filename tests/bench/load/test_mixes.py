import json
import math
from dataclasses import replace
from statistics import fmean, median, quantiles

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_bench.load.arrivals import Arrivals
from pdserve_bench.load.mixes import Lengths, Mix, Stream, counted_plan, make_plan, trace_plan
from pdserve_bench.load.plan import LoadPlan, PlannedRequest
from pdserve_bench.load.prompts import intended_hit_rate, warm_up_seed
from pdserve_bench.load.traces import TraceRow, read_trace, rescaled, trace_path

VOCABULARY = 49_152
CHAT = Stream("chat", Arrivals("poisson", 2), Lengths.uniform(20, 60), Lengths.uniform(1, 40))
DOCUMENTS = Stream("documents", Arrivals("constant", 0.5), Lengths.fixed(150), Lengths.fixed(8), tenant="b")

LENGTHS = st.one_of(
    st.builds(Lengths.fixed, st.integers(1, 500)),
    st.builds(lambda low, more: Lengths.uniform(low, low + more), st.integers(1, 300), st.integers(0, 300)),
    st.builds(
        lambda middle, ratio, low, more: Lengths.lognormal(middle, middle * ratio, low, low + more),
        st.floats(1, 500),
        st.floats(1.01, 5),
        st.integers(1, 300),
        st.integers(0, 1000),
    ),
)


def plan(*streams: Stream, seed: int = 1, duration_s: float = 30, rate_factor: float = 1.0) -> LoadPlan:
    return make_plan(Mix("test", streams), duration_s, seed, VOCABULARY, rate_factor)


def of_class(load: LoadPlan, name: str) -> list[PlannedRequest]:
    """Unnumbered, as other streams change the numbers."""
    return [replace(request, number=0) for request in load.requests if request.request_class == name]


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 2**64))
def test_lengths_stay_within_their_range(lengths: Lengths, seed: int) -> None:
    drawn = lengths.draw(50, seed)
    assert len(drawn) == 50
    assert all(type(length) is int and lengths.low <= length <= lengths.high for length in drawn)
    assert drawn == lengths.draw(50, seed)
    assert lengths.low <= lengths.mean <= lengths.high


@pytest.mark.parametrize(
    "lengths",
    [
        Lengths.fixed(7),
        Lengths.uniform(10, 20),
        Lengths.lognormal(100, 250, 1, 100_000),
        Lengths.lognormal(100, 250, 80, 120),
        Lengths.lognormal(2, 6, 1, 9),
    ],
)
def test_the_mean_is_that_of_what_is_drawn(lengths: Lengths) -> None:
    assert fmean(lengths.draw(200_000, 3)) == pytest.approx(lengths.mean, rel=0.01)


def test_lognormal_lengths_have_the_median_and_p90_asked_for() -> None:
    drawn = Lengths.lognormal(200, 600, 1, 10**6).draw(100_000, 5)
    assert median(drawn) == pytest.approx(200, rel=0.03)
    assert quantiles(drawn, n=10)[-1] == pytest.approx(600, rel=0.03)


@pytest.mark.parametrize(
    "values",
    [(0, 5), (5, 4), (1, 5, 3.0), (1, 5, None, 3.0), (1, 5, 3.0, 3.0), (1, 5, 0.0, 3.0), (1, 5, 3.0, math.inf)],
)
def test_lengths_that_make_no_sense_are_refused(values: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="lengths"):
        Lengths(*values)


def test_a_plan_merges_streams_by_time() -> None:
    load = plan(CHAT, DOCUMENTS)
    assert [request.number for request in load.requests] == [*range(len(load.requests))]
    times = [request.at_s for request in load.requests]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] == load.span_s < 30
    documents = of_class(load, "documents")
    assert [request.at_s for request in documents] == [2.0 * n for n in range(15)]
    assert all(len(one.token_ids) == 150 and one.max_tokens == 8 and one.tenant == "b" for one in documents)
    assert all(20 <= len(one.token_ids) <= 60 and 1 <= one.max_tokens <= 40 for one in of_class(load, "chat"))


def test_the_same_seed_gives_the_same_plan_and_another_one_shares_nothing() -> None:
    """FIELD_CASES J04: nor do a run's own warm-up requests."""
    stream = replace(CHAT, shared_prefix_tokens=16, num_prefixes=2)
    one = plan(stream, DOCUMENTS)
    assert one == plan(stream, DOCUMENTS)
    for other_seed in (2, warm_up_seed(1)):
        other = plan(stream, DOCUMENTS, seed=other_seed)
        ends = [{one.token_ids[:16] for one in load.requests} for load in (one, other)]
        assert not ends[0] & ends[1]


def test_another_stream_or_another_order_leaves_the_others_as_they_were() -> None:
    alone = of_class(plan(CHAT), "chat")
    assert alone
    assert of_class(plan(CHAT, DOCUMENTS), "chat") == alone
    assert of_class(plan(DOCUMENTS, CHAT), "chat") == alone


def test_streams_of_one_name_and_tenants_draw_for_themselves() -> None:
    twins = of_class(plan(CHAT, CHAT, replace(CHAT, tenant="b")), "chat")
    assert len({request.token_ids for request in twins}) == len(twins)
    assert len({request.at_s for request in twins}) == len(twins)


def test_a_rate_factor_brings_the_same_requests_sooner() -> None:
    slow, fast = plan(CHAT), plan(CHAT, duration_s=15, rate_factor=2)
    assert [request.token_ids for request in fast.requests] == [request.token_ids for request in slow.requests]
    assert [request.at_s for request in fast.requests] == pytest.approx([one.at_s / 2 for one in slow.requests])


def test_a_changed_share_of_cancellations_changes_only_who_hangs_up() -> None:
    plans = [plan(replace(CHAT, cancel_share=share), duration_s=500) for share in (0.0, 0.3, 1.0)]
    bare = [[replace(one, cancel_after_tokens=None) for one in load.requests] for load in plans]
    assert bare[0] == bare[1] == bare[2]
    none, some, every = ([one for one in load.requests if one.cancel_after_tokens is not None] for load in plans)
    assert not none
    assert len(some) / len(bare[0]) == pytest.approx(0.3, abs=0.06)
    assert len(every) == sum(one.max_tokens > 1 for one in bare[0]) < len(bare[0])
    assert {one.number for one in some} <= {one.number for one in every}
    midway = [(one.cancel_after_tokens or 0) / one.max_tokens for one in every]
    assert all(0 < part < 1 for part in midway)
    assert fmean(midway) == pytest.approx(0.5, abs=0.05)


def test_requests_share_system_prompts_of_their_stream() -> None:
    load = plan(replace(DOCUMENTS, shared_prefix_tokens=64, num_prefixes=3), duration_s=200)
    assert len({request.token_ids[:64] for request in load.requests}) == 3
    assert len({request.token_ids[64:80] for request in load.requests}) == len(load.requests)
    assert load.intended_hit_rate == pytest.approx((100 - 3) * 64 / (100 * 150))


def test_another_seed_shares_system_prompts_between_other_requests() -> None:
    stream = replace(DOCUMENTS, shared_prefix_tokens=64, num_prefixes=2)
    begins = [[one.token_ids[:64] for one in plan(stream, seed=seed, duration_s=100).requests] for seed in (1, 2)]
    first, second = ([one == prompts[0] for one in prompts] for prompts in begins)
    assert first != second


def test_fresh_prompts_intend_no_hit() -> None:
    assert plan(CHAT, DOCUMENTS).intended_hit_rate == 0


def test_rates_and_lengths_can_be_told_from_a_stream() -> None:
    load = plan(CHAT, duration_s=2000, rate_factor=0.5)
    assert len(load.requests) / 2000 == pytest.approx(CHAT.mean_rate(0.5), rel=0.1)
    assert fmean(len(one.token_ids) for one in load.requests) == pytest.approx(CHAT.prompt.mean, rel=0.03)
    assert fmean(one.max_tokens for one in load.requests) == pytest.approx(CHAT.output.mean, rel=0.05)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cancel_share": 1.5}, "1.5"),
        ({"shared_prefix_tokens": 16}, "both their number"),
        ({"num_prefixes": 2}, "both their number"),
        ({"num_prefixes": -2}, "not be negative"),
        ({"shared_prefix_tokens": 20, "num_prefixes": 1}, "hold no prefix of 20"),
    ],
)
def test_streams_that_make_no_sense_are_refused(changed: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CHAT, **changed)  # type: ignore[arg-type]


def test_a_mix_without_streams_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one stream"):
        Mix("empty", ())


def test_a_counted_plan_has_so_many_requests() -> None:
    load = counted_plan(replace(CHAT, arrivals=Arrivals("poisson", math.inf)), 25, 1, VOCABULARY)
    assert len(load.requests) == 25
    assert {request.at_s for request in load.requests} == {0.0}
    paced = counted_plan(CHAT, 25, 1, VOCABULARY)
    assert [one.token_ids for one in paced.requests] == [one.token_ids for one in load.requests]
    assert paced.requests[:10] == plan(CHAT).requests[:10]
    assert counted_plan(CHAT, 0, 1, VOCABULARY).requests == ()


def test_what_a_plan_is_about_is_json_that_tells_all() -> None:
    endless = replace(CHAT, arrivals=Arrivals("poisson", math.inf))
    counted = counted_plan(endless, 2, 1, VOCABULARY)
    told = json.loads(json.dumps(counted.about, allow_nan=False))
    assert told["stream"]["arrivals"]["rate"] == "inf"
    mixed = json.loads(json.dumps(plan(CHAT, rate_factor=2).about, allow_nan=False))
    assert (mixed["duration_s"], mixed["rate_factor"], mixed["vocab_size"]) == (30, 2, VOCABULARY)
    assert mixed["streams"][0]["prompt"] == {"low": 20, "high": 60, "median": None, "p90": None}


def test_a_trace_is_replayed_as_its_rows_say() -> None:
    rows = [TraceRow(0.0, 100, 5, (1, 2), 32), TraceRow(1.5, 80, 0, (1, 3), 32)]
    load = trace_plan(rows, 1, VOCABULARY, about={"trace": "made up"})
    first, second = load.requests
    assert (first.at_s, second.at_s) == (0.0, 1.5)
    assert (len(first.token_ids), len(second.token_ids)) == (100, 80)
    assert (first.max_tokens, second.max_tokens) == (5, 1)
    assert first.token_ids[:32] == second.token_ids[:32]
    assert first.token_ids[32:48] != second.token_ids[32:48]
    assert load.intended_hit_rate == 32 / 180
    assert load.about["trace"] == "made up"
    assert first.request_class == "trace"
    with pytest.raises(ValueError, match=r"\[32, 64\]"):
        trace_plan([rows[0], replace(rows[1], block_tokens=64)], 1, VOCABULARY)


def trace_hit_rate(rows: list[TraceRow]) -> float:
    """By the names of the trace alone, each standing for one token."""
    return intended_hit_rate([row.hash_ids for row in rows], block_size=1)


def test_a_scaled_trace_keeps_its_shared_prefixes() -> None:
    rows = read_trace(trace_path("mooncake-sample"))
    scaled = rescaled(rows, length_factor=1 / 32, max_prompt_tokens=8000, max_output_tokens=100)
    load = trace_plan(scaled, 1, VOCABULARY)
    assert load.intended_hit_rate == pytest.approx(trace_hit_rate(rows), rel=0.06)
    assert load.intended_hit_rate > 0.03
