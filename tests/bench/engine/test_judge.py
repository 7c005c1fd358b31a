"""The targets that results are held against, and the figures behind them."""

from dataclasses import replace

import pytest

from pdserve_bench.engine.judge import JUDGED_MODEL, targets
from pdserve_bench.engine.plan import Configuration
from pdserve_bench.engine.results import ConfigurationResult, DecodeCell, Limits, PrefillCell, Shares, Spread

LIMITS = Limits(bytes_per_s=10e9, flops_per_s=100e9, model_flops_per_s=90e9, foreign_cores=0.0)
SHARES = Shares(0.7, 0.2, 0.03, 0.05, 0.02)


def spread(median_s: float) -> Spread:
    return Spread.of([0.5 * median_s, median_s, 4 * median_s])


def decode(batch: int, context: int, step_s: float, noise: float = 0.0) -> DecodeCell:
    """The floor of its step is 0.1 s."""
    return DecodeCell(batch, context, spread(step_s), 10**9, SHARES, noise, 1)


def prefill(num_tokens: int, chunk: int, seconds: float, noise: float = 0.0) -> PrefillCell:
    """Its floor is 1 s."""
    return PrefillCell(num_tokens, chunk, spread(seconds), 10**11, SHARES, noise, 1)


def result(
    configuration: Configuration,
    *cells: DecodeCell | PrefillCell,
    model: str = JUDGED_MODEL,
    limits: Limits = LIMITS,
) -> ConfigurationResult:
    return ConfigurationResult(
        configuration=configuration,
        model_name=model,
        fingerprint="f",
        evaluation_id="e",
        kv_inner_order="slot_dim",
        weight_bytes=1,
        kv_bytes_per_token=1,
        flops_per_token=1,
        limits=limits,
        decode=tuple(cell for cell in cells if isinstance(cell, DecodeCell)),
        prefill=tuple(cell for cell in cells if isinstance(cell, PrefillCell)),
    )


def test_decode_is_judged_on_two_threads_in_bfloat16() -> None:
    cells = (decode(8, 512, 0.15, noise=0.3), decode(8, 2048, 0.15), decode(32, 2048, 0.16), decode(1, 512, 9.0))
    found = targets([result(Configuration("bfloat16", 2), *cells)])
    floors = [target for target in found if target.unit == "floors"]
    assert [(target.value, target.target, target.met) for target in floors] == [
        (pytest.approx(1.5), 1.6, True),
        (pytest.approx(1.5), 1.4, False),
        (pytest.approx(1.6), 1.7, True),
    ]
    outside = [target for target in found if target.unit == "of step"]
    assert [(target.value, target.target, target.met) for target in outside] == [(pytest.approx(0.1), 0.08, False)] * 3
    assert [target.noise for target in floors] == [0.3, 0.0, 0.0]


def test_prefill_is_judged_on_one_thread() -> None:
    cells = (prefill(2048, 512, 2.0, noise=0.02), prefill(2048, 128, 2.3, noise=0.01), prefill(512, 512, 9.0))
    share, slower = targets([result(Configuration("bfloat16", 1), *cells)])
    assert (share.value, share.op, share.target, share.met) == (pytest.approx(0.5), ">=", 0.51, False)
    assert (slower.value, slower.op, slower.target, slower.met) == (pytest.approx(1.15), "<=", 1.1, False)
    assert (share.noise, slower.noise) == (0.02, 0.02)


def test_attention_in_bfloat16_has_a_higher_bound() -> None:
    (share,) = targets([result(Configuration("bfloat16", 1, "bfloat16"), prefill(2048, 512, 1.5))])
    assert (share.target, share.met) == (0.55, True)
    assert "bfloat16 attention" in share.name


@pytest.mark.parametrize(
    ("configuration", "model"),
    [
        (Configuration("float32", 2), JUDGED_MODEL),
        (Configuration("bfloat16", 4), JUDGED_MODEL),
        (Configuration("bfloat16", 2, "bfloat16"), JUDGED_MODEL),
        (Configuration("bfloat16", 2), "another"),
    ],
)
def test_nothing_else_is_judged(configuration: Configuration, model: str) -> None:
    cells = (decode(8, 512, 0.1), prefill(2048, 512, 2.0), prefill(2048, 128, 2.0))
    assert targets([result(configuration, *cells, model=model)]) == []


def test_a_floor_measured_in_noise_marks_what_is_held_against_it() -> None:
    noisy = Limits(10e9, 100e9, 90e9, 0.4)
    on_two = targets([result(Configuration("bfloat16", 2), decode(8, 512, 0.1, noise=0.05), limits=noisy)])
    assert [(target.unit, target.noise) for target in on_two] == [("floors", 0.4), ("of step", 0.05)]
    cells = (prefill(2048, 512, 2.0), prefill(2048, 128, 2.0, noise=0.01))
    on_one = targets([result(Configuration("bfloat16", 1), *cells, limits=noisy)])
    assert [target.noise for target in on_one] == [0.4, 0.01]
    assert result(Configuration("bfloat16", 1), limits=noisy).foreign_cores == 0.4


def test_a_model_that_keeps_no_account_has_no_shares_to_judge() -> None:
    cell = replace(decode(8, 512, 0.1), shares=None)
    assert [target.unit for target in targets([result(Configuration("bfloat16", 2), cell)])] == ["floors"]


def test_shares_make_up_the_time() -> None:
    shares = Shares.of(2.0, gemm_s=1.0, attention_s=0.5, sampling_s=0.1, model_rest_s=0.2)
    parts = (shares.gemm, shares.attention, shares.sampling, shares.model_rest, shares.python)
    assert parts == pytest.approx((0.5, 0.25, 0.05, 0.1, 0.1))
    assert shares.outside == pytest.approx(0.25)


def test_a_spread_orders_its_figures() -> None:
    found = Spread.of([5.0, 1.0, 3.0, 2.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0])
    assert found == Spread(num=11, median_s=6.0, p10_s=2.0, p90_s=10.0, min_s=1.0)
    assert Spread.of([2.0]) == Spread(1, 2.0, 2.0, 2.0, 2.0)


def test_figures_follow_from_the_limits() -> None:
    cell = prefill(2048, 512, 4.0)
    assert (cell.tokens_per_s, cell.floor_s(LIMITS), cell.ceiling_share(LIMITS)) == (512.0, 1.0, 0.25)
    assert decode(1, 1, 0.3).floors(LIMITS) == pytest.approx(3.0)
    assert LIMITS.best(Limits(20e9, 50e9, 95e9, 0.2)) == Limits(20e9, 100e9, 95e9, 0.0)
