"""The keys and meanings that tools for `vllm bench serve` rely on, and its flags."""

import json
import math

import pytest

from pdserve_bench.load.records import Outcome
from pdserve_bench.measures.summarise import summarise
from pdserve_bench.measures.summary import Slo
from pdserve_bench.measures.vllm_flags import VllmOptions, VllmSlo, parse_metric_percentiles, parse_percentile_metrics
from pdserve_bench.measures.vllm_format import parse_goodput, request_goodput, vllm_result
from tests.bench.measures.making import record, run_of

RUN = run_of(
    [
        record(0, scheduled_s=0.0, sent_s=0.25, events=[(0.5, 1), (0.75, 1), (1.5, 2)], output="a b c d"),
        record(1, scheduled_s=1.0, sent_s=1.0, events=[(3.0, 1)], output="e"),
        record(2, Outcome.FAILED, [(2.0, 3)], error="reset"),
        record(3, Outcome.REJECTED, error="429"),
        record(4, Outcome.UNFINISHED, sent_s=None),
        record(5, Outcome.CANCELLED, [(2.25, 2)]),
    ]
)


def _result(options: VllmOptions, request_rate: float = 2.5) -> dict[str, object]:
    summary = summarise(RUN, Slo(ttft_s=1.0, itl_s=1.0))
    return vllm_result(
        RUN, summary, request_rate=request_rate, burstiness=1.0, max_concurrency=None, model="tiny", options=options
    )


def test_counts_and_rates() -> None:
    result = _result(VllmOptions(goodput=VllmSlo(ttft=500.0)))
    expected = {
        "num_prompts": 6,
        "completed": 2,
        "failed": 2,
        "rejected": 1,
        "cancelled": 1,
        "unfinished": 1,
        "duration": 10.0,
        "request_throughput": 0.2,
        "request_goodput": 0.1,
        "goodput": 1 / 6,
        "total_input_tokens": 400,
        "total_output_tokens": 10,
        "output_throughput": 1.0,
        "total_token_throughput": 41.0,
        "max_output_tokens_per_s": 5.0,
        "max_concurrent_requests": 7,
        "request_rate": 2.5,
        "burstiness": 1.0,
        "max_concurrency": None,
        "model_id": "tiny",
        "backend": "openai",
        "label": "apart",
    }
    assert {key: result[key] for key in expected} == expected
    assert result["date"] == "20261130-005320"


def test_latencies_from_the_scheduled_and_from_the_send_time() -> None:
    result = _result(VllmOptions(metric_percentiles=(50.0, 99.9)))
    assert result["mean_ttft_ms"] == 1250.0
    assert result["median_ttft_from_send_ms"] == 1125.0
    assert result["median_e2el_ms"] == 1750.0
    assert result["mean_e2el_from_send_ms"] == 1625.0
    assert result["std_ttft_ms"] == 750.0
    assert result["median_tpot_ms"] == pytest.approx(1000 / 3)
    assert (result["mean_itl_ms"], result["p50_itl_ms"]) == (pytest.approx(1000 / 3), 250.0)
    assert result["p99.9_e2el_ms"] == pytest.approx(1500 + 500 * 0.999)
    assert "p99_ttft_ms" not in result


def test_only_the_metrics_asked_for() -> None:
    result = _result(VllmOptions(percentile_metrics=("itl",), detailed=False))
    assert {key for key in result if key.endswith("_ms")} == {
        "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p50_itl_ms", "p99_itl_ms"
    }  # fmt: skip
    assert not {"ttfts", "itls", "errors", "input_lens", "output_lens", "generated_texts"} & set(result)


def test_each_list_has_an_entry_for_every_request() -> None:
    result = _result(VllmOptions())
    assert result["ttfts"] == [0.5, 2.0, 2.0, None, None, 2.25]
    assert result["itls"] == [[0.25, 0.75, 0.0], [], [0.0, 0.0], [], [], [0.0]]
    assert result["output_lens"] == [4, 1, 3, 0, 0, 2]
    assert result["input_lens"] == [100] * 6
    assert result["start_times"] == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert result["send_times"] == [0.25, 1.0, 0.0, 0.0, None, 0.0]
    assert result["errors"] == ["", "", "reset", "429", "unfinished", "cancelled"]
    assert result["generated_texts"] == ["a b c d", "e", "", "", "", ""]


def test_json_has_no_nan_and_no_infinity() -> None:
    result = _result(VllmOptions(), request_rate=math.inf)
    assert result["request_rate"] == "inf"
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    nothing = run_of([], 0.0)
    empty = vllm_result(
        nothing, summarise(nothing, Slo()), request_rate=1.0, burstiness=1.0, max_concurrency=8, model="tiny"
    )
    json.dumps(empty, allow_nan=False)
    assert empty["median_ttft_ms"] is None
    assert empty["request_goodput"] is None


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (VllmSlo(), 2),
        (VllmSlo(ttft=500.0), 1),
        (VllmSlo(ttft=499.0), 0),
        (VllmSlo(tpot=300.0), 1),
        (VllmSlo(tpot=334.0), 2),
        (VllmSlo(e2el=1500.0), 1),
        (VllmSlo(ttft=2000.0, tpot=0.0), 1),
    ],
)
def test_vllm_goodput_takes_the_mean_tpot_and_zero_for_one_token(slo: VllmSlo, good: int) -> None:
    assert request_goodput(RUN, slo) == good / 10


def test_flags() -> None:
    assert parse_goodput(["ttft:6000", "tpot:100.5"]) == VllmSlo(ttft=6000.0, tpot=100.5)
    assert parse_goodput(["e2el:0"]) == VllmSlo(e2el=0.0)
    assert parse_percentile_metrics("ttft, e2el") == ("ttft", "e2el")
    assert parse_metric_percentiles("50,99.9, 100") == (50.0, 99.9, 100.0)


@pytest.mark.parametrize(
    "pair", ["ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "ttft:inf", "itl:5", ":5", "ttft:1:2"]
)
def test_a_bad_objective_is_named(pair: str) -> None:
    with pytest.raises(ValueError, match="goodput objective") as error:
        parse_goodput([pair])
    assert repr(pair) in str(error.value)


def test_an_objective_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="ttft is given twice"):
        parse_goodput(["ttft:1", "ttft:2"])


@pytest.mark.parametrize("percentiles", ["", "50,", "101", "-1", "nan", "p99"])
def test_a_bad_percentile_is_refused(percentiles: str) -> None:
    with pytest.raises(ValueError, match="percentile"):
        parse_metric_percentiles(percentiles)


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="'e2e'"):
        parse_percentile_metrics("ttft,e2e")
