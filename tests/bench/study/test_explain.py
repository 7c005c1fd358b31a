"""Answers: what differs beyond the noise, why, and what the load asked for."""

from pathlib import Path

import pytest

from pdserve_bench.compare.phases import Phase
from pdserve_bench.compare.verdict import Decision
from pdserve_bench.study.explain import demand_of
from tests.bench.study.studies import APART, TOGETHER, made_run, study


def test_stalls_that_break_the_objective_speak_for_disaggregating(tmp_path: Path) -> None:
    one = study(tmp_path).answers[0]
    assert one.conclusion is not None
    assert one.conclusion.decision is Decision.DISAGGREGATE
    assert Phase.DECODE in {finding.phase for finding in one.findings}
    assert set(one.limits) == {TOGETHER, APART}
    assert sum(one.shares[APART].values()) == pytest.approx(1.0)


def test_slower_tokens_apart_speak_against_it(tmp_path: Path) -> None:
    one = study(tmp_path, itls_s=(0.02, 0.12)).answers[0]
    assert one.conclusion is not None
    assert one.conclusion.decision is Decision.COLOCATE


def test_equal_fleets_differ_in_nothing_that_counts(tmp_path: Path) -> None:
    one = study(tmp_path, itls_s=(0.02, 0.02)).answers[0]
    assert one.conclusion is not None
    assert one.conclusion.decision is Decision.NO_DIFFERENCE
    assert Phase.DECODE not in {finding.phase for finding in one.findings}


def test_the_demand_is_what_was_sent(tmp_path: Path) -> None:
    run = made_run(APART, 0.02, seed=1)
    demand = demand_of([run])
    assert demand is not None
    assert demand.prompt_rate == pytest.approx(sum(r.num_prompt_tokens for r in run.records) / run.duration_s)
    assert demand.output_rate == pytest.approx(sum(r.max_tokens for r in run.records) / run.duration_s)
    computed = sum(record.num_prompt_tokens for record in run.records)
    assert demand.rates.prefill_tokens_per_s == pytest.approx(computed / run.server_cpu_s["prefill-0"])


def test_a_colocated_run_tells_no_rates_of_phases(tmp_path: Path) -> None:
    assert demand_of([made_run(TOGETHER, 0.02, seed=1)]) is None
