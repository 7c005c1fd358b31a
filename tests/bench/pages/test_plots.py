import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pdserve_bench.pages import plots


def _texts(figure: Figure | None) -> list[str]:
    assert figure is not None
    legends = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return [text.get_text() for text in figure.axes[0].texts] + legends


def test_a_cdf_shows_objective_counts_and_percentiles() -> None:
    figure = plots.latency_cdf("TTFT", "ms", {"apart": np.arange(51, 151) / 1000, "together": [0.06] * 3}, slo_s=0.1)
    assert figure is not None
    (axes,) = figure.axes
    assert axes.get_xscale() == "linear"
    curve, marks, *_, objective = axes.lines
    assert list(marks.get_xdata()) == pytest.approx([100, 140, 149])
    assert list(objective.get_xdata()) == [100, 100]
    at_50 = np.searchsorted(curve.get_xdata(), 100.0, side="right") - 1
    assert curve.get_ydata()[at_50] == 50
    assert _texts(figure) == ["apart (n=100)", "together (n=3)", "objective: 100 ms"]
    assert axes.get_xlabel().startswith("latency (ms)")


def test_a_cdf_is_logarithmic_where_the_range_asks_for_it_and_draws_zeros_at_its_edge() -> None:
    figure = plots.latency_cdf("ITL", "s", {"apart": [0.0, 0.0, 0.01, 0.6]})
    assert figure is not None
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    at = axes.lines[0].get_xdata()
    assert at[0] == pytest.approx(axes.get_xlim()[0])
    assert at[-2] == 0.6


def test_lines_differ_without_their_colours() -> None:
    figure = plots.latency_cdf("ITL", "s", {str(number): [0.1, 0.2] for number in range(8)})
    assert figure is not None
    handles = figure.legends[0].get_lines()
    assert len({(handle.get_linestyle(), handle.get_marker()) for handle in handles}) == 8


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf")])
def test_a_sample_that_is_no_latency_is_named(wrong: float) -> None:
    with pytest.raises(ValueError, match=f"fleet x: {wrong} is no latency"):
        plots.latency_cdf("ITL", "s", {"fleet x": [0.1, wrong]})


def test_goodput_has_whiskers_from_least_to_most() -> None:
    figure = plots.goodput_against_rate({"apart": [(2.0, 0.5, 0.4, 0.7), (1.0, 1.0, 0.9, 1.0)]})
    assert figure is not None
    (axes,) = figure.axes
    assert axes.lines[0].get_xdata().tolist() == [1.0, 2.0]
    (whiskers,) = axes.collections
    ends = [sorted(segment[:, 1].tolist()) for segment in whiskers.get_segments()]
    assert np.allclose(ends, [[90, 100], [40, 70]])


@pytest.mark.parametrize("row", [(1, 0.5, 0.6, 0.7), (1, 3.5, 3, 4), (0, 0.5, 0.5, 0.5), (1, float("nan"), 0, 1)])
def test_a_goodput_outside_its_repeats_or_above_all_is_refused(row: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match=r"apart: .* is no rate with a goodput"):
        plots.goodput_against_rate({"apart": [row]})


def test_itl_over_time_shows_gaps_of_interactive_requests_and_arrivals_of_long_ones(make_record, make_run) -> None:
    chat = make_record(0, [1.0, 1.1, 1.6])
    long = make_record(1, [4.0, 7.0], scheduled_s=1.2, num_prompt_tokens=1500)
    figure = plots.itl_over_time(make_run([chat, long]), slo_s=0.1)
    assert figure is not None
    (axes,) = figure.axes
    assert axes.lines[0].get_xdata().tolist() == [1.1, 1.6]
    assert np.allclose(axes.lines[0].get_ydata(), [100, 500])
    for marks in axes.collections:
        assert [segment[0, 0] for segment in marks.get_segments()] == [1.2]
    assert _texts(figure) == ["a gap between two tokens", "a long prompt arrives (1)", "objective: 100 ms"]


def test_the_long_prompts_can_be_those_of_a_class(make_record, make_run) -> None:
    records = [make_record(0, [1.0, 1.1], num_prompt_tokens=9000), make_record(1, [2.0, 2.5], request_class="doc")]
    figure = plots.itl_over_time(make_run(records), prefill_class="doc")
    assert figure is not None
    assert figure.axes[0].lines[0].get_xdata().tolist() == [1.1]


def test_two_runs_can_share_an_axis(make_record, make_run) -> None:
    limits = []
    for gap_s in (0.05, 1.5):
        figure = plots.itl_over_time(make_run([make_record(0, [1.0, 1.0 + gap_s])]), range_s=(0.04, 1.6))
        assert figure is not None
        limits.append(figure.axes[0].get_ylim())
    assert limits[0] == limits[1]


def test_very_many_arrivals_are_thinned_and_still_counted(make_record, make_run) -> None:
    longs = [make_record(n, [], scheduled_s=n / 500, num_prompt_tokens=2000) for n in range(5000)]
    figure = plots.itl_over_time(make_run([make_record(9999, [1.0, 2.0]), *longs]))
    assert figure is not None
    assert len(figure.axes[0].collections[0].get_segments()) <= 301
    assert "a long prompt arrives (5\u202f000)" in _texts(figure)


def test_phase_bars_add_up() -> None:
    figure = plots.phase_bars({"apart": {"queue": 0.1, "prefill": 0.3}, "together": {"prefill": 0.2, "decode": 0.1}})
    assert figure is not None
    bars = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle) and patch.get_width()]
    assert np.allclose([(bar.get_x(), bar.get_width()) for bar in bars], [(0, 100), (100, 300), (0, 200), (200, 100)])
    assert {"400 ms", "300 ms", "200 ms", "100 ms"} <= set(_texts(figure))
    assert len({bar.get_hatch() for bar in figure.legends[0].get_patches()}) == 3
    with pytest.raises(ValueError, match="apart, queue: -1 is no time"):
        plots.phase_bars({"apart": {"queue": -1}})


def test_a_ratio_within_its_band_is_hollow_and_one_that_is_none_is_named_only() -> None:
    figure = plots.ratio_chart([("goodput", 1.6, 0.9, 1.1), ("TPOT", 1.05, 0.9, 1.1), ("rejected", None, 0.9, 1.1)])
    assert figure is not None
    _, outside, within = figure.axes[0].lines
    assert outside.get_markerfacecolor() != "none"
    assert within.get_markerfacecolor() == "none"
    assert {"goodput", "1.60×", "1.05×", "rejected", "–"} <= set(_texts(figure))


@pytest.mark.parametrize("row", [("x", 1.0, 0.0, 1.0), ("x", 1.0, 1.2, 1.1), ("x", -1.0, 0.9, 1.1)])
def test_an_impossible_ratio_or_band_is_named(row: tuple[str, float, float, float]) -> None:
    with pytest.raises(ValueError, match="x: "):
        plots.ratio_chart([row])


def test_a_load_is_met_only_if_it_was_each_time() -> None:
    figure = plots.capacity_map(
        [
            plots.CapacityPoint(0.5, 0, True),
            plots.CapacityPoint(0.5, 1, True),
            plots.CapacityPoint(0.5, 1, False, "TTFT"),
            plots.CapacityPoint(1.0, 0, False, "p99 ITL"),
        ]
    )
    assert figure is not None
    marks = {text.get_position(): text.get_text() for text in figure.axes[0].texts}
    assert marks == {(0, 0): "✓", (0, 1): "a", (1, 0): "b"}
    assert _texts(figure)[-3:] == ["✓: every objective met", "a: TTFT", "b: p99 ITL"]


def test_without_data_there_is_no_figure(make_record, make_run) -> None:
    assert plots.latency_cdf("TTFT", "s", {}) is None
    assert plots.latency_cdf("TTFT", "s", {"apart": []}) is None
    assert plots.goodput_against_rate({"apart": []}) is None
    assert plots.itl_over_time(make_run([make_record(0, [1.0]), make_record(1, [])])) is None
    assert plots.phase_bars({"apart": {}}) is None
    assert plots.ratio_chart([]) is None
    assert plots.capacity_map([]) is None


def test_drawing_leaves_matplotlib_as_it_was() -> None:
    before = dict(mpl.rcParams)
    plots.ratio_chart([("goodput", 1.6, 0.9, 1.1)])
    assert dict(mpl.rcParams) == before
