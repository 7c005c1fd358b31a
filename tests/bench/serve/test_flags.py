"""What load the flags of `bench serve` mean, and which combinations mean none."""

import math
from pathlib import Path
from typing import Any

import pytest

from pdserve_bench.serve.flags import LoadFlags, lengths, listed
from pdserve_bench.serve.options import Load, PresetLoad, RandomLoad, ServerOptions, TraceLoad


def test_by_default_it_is_as_in_vllms_benchmark() -> None:
    plan = LoadFlags(num_prompts=7).load().plan(1)
    assert [(one.at_s, len(one.token_ids), one.max_tokens) for one in plan.requests] == [(0.0, 1024, 128)] * 7
    load = LoadFlags().load()
    assert isinstance(load, RandomLoad)
    assert load.num_prompts is None
    assert len(LoadFlags(input_len="1", output_len="1").load().plan(1).requests) == 1000


def test_random_prompts_by_rate_and_duration() -> None:
    flags = LoadFlags(request_rate="50", duration=10.0, input_len="4-8", output_len="2-3", burstiness=0.5)
    plan = flags.load().plan(1)
    assert 300 < len(plan.requests) < 700
    assert {len(one.token_ids) for one in plan.requests} == {4, 5, 6, 7, 8}
    assert {one.max_tokens for one in plan.requests} == {2, 3}
    assert plan.span_s < 10
    assert plan.intended_hit_rate == 0


def test_a_preset_and_a_trace() -> None:
    mixed = LoadFlags(preset="mixed", rate_factor=2.0).load()
    assert isinstance(mixed, PresetLoad)
    assert mixed.rate == pytest.approx(1.84)
    assert LoadFlags(dataset_name="mixed", rate_factor=2.0).load() == mixed
    trace = LoadFlags(trace="azure-conv-sample", length_factor=0.01, num_prompts=5).load()
    assert isinstance(trace, TraceLoad)
    assert len(trace.plan(1).requests) == 5
    path = str(Path("somewhere") / "none.csv")
    with pytest.raises(ValueError, match=r"none\.csv: no such trace file"):
        LoadFlags(dataset_name="trace", dataset_path=path).load()


@pytest.mark.parametrize(
    "load",
    [
        LoadFlags().load(),
        LoadFlags(request_rate="3").load(),
        LoadFlags(request_rate="3", burstiness=0.3).load(),
        LoadFlags(request_rate="1", ramp_to=5.0).load(),
        LoadFlags(preset="mixed", rate_factor=0.5).load(),
        LoadFlags(trace="azure-code-sample", length_factor=0.01, rate_factor=3.0).load(),
    ],
)
@pytest.mark.parametrize("rate", [2.0, 4.0])
def test_a_load_can_be_had_at_another_rate(load: Load, rate: float) -> None:
    other = load.at(rate, 40.0)
    assert type(other) is type(load)
    assert other.rate == pytest.approx(rate)
    plan = other.plan(1)
    assert len(plan.requests) == pytest.approx(40 * rate, rel=0.5)
    assert plan.span_s == pytest.approx(40, rel=0.3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"request_rate": "fast"}, "--request-rate fast: expected"),
        ({"request_rate": "0"}, "--request-rate 0: expected"),
        ({"request_rate": "nan"}, "--request-rate nan: expected"),
        ({"input_len": "0"}, "--input-len 0: expected"),
        ({"output_len": "9-3"}, "--output-len 9-3: expected"),
        ({"burstiness": -1.0, "request_rate": "1"}, "--request-rate, --burstiness, --ramp-to: burstiness must be"),
        ({"duration": 0.0, "request_rate": "1"}, "--duration 0: expected"),
        ({"duration": 5.0}, "--duration needs a --request-rate"),
        ({"duration": 5.0, "request_rate": "1", "num_prompts": 3}, "--num-prompts and --duration exclude each other"),
        ({"ramp_to": 5.0}, "--request-rate, --burstiness, --ramp-to: a ramp needs finite rates"),
        ({"rate_factor": 2.0}, "--rate-factor has no effect on random prompts"),
        ({"max_input_len": 10}, "--max-input-len has no effect on random prompts"),
        ({"dataset_name": "sharegpt"}, "--dataset-name sharegpt: expected one of random, trace, chat"),
        ({"dataset_name": "trace"}, "--dataset-name trace needs --dataset-path"),
        ({"dataset_name": "random", "trace": "azure-conv-sample"}, "--trace is of --dataset-name trace, not random"),
        ({"preset": "idle"}, "--preset idle: expected one of chat"),
        ({"preset": "chat", "dataset_name": "rag"}, "--preset chat and --dataset-name rag exclude each other"),
        ({"preset": "chat", "trace": "azure-conv-sample"}, "--trace and --preset exclude each other"),
        ({"preset": "chat", "request_rate": "3"}, "--request-rate has no effect on the preset chat"),
        ({"preset": "chat", "num_prompts": 3}, "--num-prompts has no effect on the preset chat"),
        ({"preset": "chat", "rate_factor": 0.0}, "--rate-factor 0: expected"),
        ({"trace": "azure-conv-sample", "input_len": "5"}, "--input-len has no effect on a trace"),
        ({"trace": "azure-conv-sample", "length_factor": math.inf}, "--length-factor inf: expected"),
    ],
)
def test_flags_that_mean_no_load_are_refused_by_name(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        LoadFlags(**flags).load()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"base_url": "127.0.0.1:8000"}, "--base-url 127.0.0.1:8000: expected http://"),
        ({"endpoint": "/v1/chat/completions"}, "--endpoint /v1/chat/completions: expected"),
        ({"endpoint": "/generate"}, "--endpoint /generate: expected"),
    ],
)
def test_a_server_that_cannot_be_asked_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerOptions(**given)


def test_lists_and_ranges() -> None:
    assert listed("0.5,1, 2", "--rates", float) == (0.5, 1.0, 2.0)
    assert (lengths("5", "--x").low, lengths("5-9", "--x").high) == (5, 9)
    for text in ("", "a", "1,,2"):
        with pytest.raises(ValueError, match=r"--documents .*: expected numbers"):
            listed(text, "--documents", int)


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(ServerOptions(api_key="secret"))
