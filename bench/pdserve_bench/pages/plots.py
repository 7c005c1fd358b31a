"""Curves of a benchmark: data in, a figure out; None where there is nothing to draw. Other plots lie beside."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike

from pdserve_bench.pages import thinning
from pdserve_bench.pages.bars import phase_bars, ratio_chart
from pdserve_bench.pages.capacity_map import CapacityPoint, capacity_map
from pdserve_bench.pages.itl_over_time import itl_over_time
from pdserve_bench.pages.style import INK, MARKER_SIZE, Stroke, add_legend, fit_axis, new_plot, scale_axis, styled
from pdserve_bench.pages.text import count, objective_s
from pdserve_bench.pages.thinning import Floats

__all__ = [
    "CapacityPoint",
    "capacity_map",
    "goodput_against_rate",
    "itl_over_time",
    "latency_cdf",
    "phase_bars",
    "ratio_chart",
]

TimeUnit = Literal["s", "ms"]

_PER_S = {"s": 1.0, "ms": 1000.0}
_MARKED = (50, 90, 99)


@styled
def latency_cdf(
    title: str, unit: TimeUnit, samples_s: Mapping[str, ArrayLike], slo_s: float | None = None
) -> Figure | None:
    """The share of the samples up to each latency, a curve a name, with p50, p90 and p99 marked.

    Args:
        unit: of the axis; samples are seconds.
        slo_s: drawn as a vertical line.

    Raises:
        ValueError: a sample is negative or no number.
    """
    curves = {name: _checked(name, samples) * _PER_S[unit] for name, samples in samples_s.items()}
    curves = {name: values for name, values in curves.items() if values.size}
    if not curves:
        return None
    slo = [] if slo_s is None else [slo_s * _PER_S[unit]]
    figure, axes = new_plot(title, f"latency ({unit}); marks: p50, p90, p99", "share of samples (%)")
    low = fit_axis(axes, "x", np.concatenate([*curves.values(), slo]))
    axes.set_ylim(0, 103)
    handles = [_draw_cdf(axes, values, low, Stroke.of(number)) for number, values in enumerate(curves.values())]
    labels = [f"{name} (n={count(values.size)})" for name, values in curves.items()]
    if slo_s is not None:
        handles.append(axes.axvline(slo[0], color=INK, linewidth=1.2, linestyle=(0, (2, 2))))
        labels.append(f"objective: {objective_s(slo_s)}")
    add_legend(figure, handles, labels)
    return figure


def _checked(name: str, samples: ArrayLike) -> Floats:
    values = np.asarray(samples, dtype=np.float64).ravel()
    wrong = values[~(np.isfinite(values) & (values >= 0))]
    if wrong.size:
        raise ValueError(f"{name}: {wrong[0]} is no latency in seconds")
    return values


def _draw_cdf(axes: Axes, values: Floats, low: float, stroke: Stroke) -> Line2D:
    """A handle for the legend."""
    at, shares = thinning.cdf(values)
    begin, end = np.maximum(at[:1], low), axes.get_xlim()[1]
    axes.step(
        np.concatenate([begin, np.maximum(at, low), [end]]),
        100 * np.concatenate([[0.0], shares, [1.0]]),
        where="post",
        color=stroke.color,
        linestyle=stroke.dash,
    )
    marks = np.maximum(np.percentile(values, _MARKED, method="inverted_cdf"), low)
    axes.plot(
        marks,
        _MARKED,
        color=stroke.color,
        marker=stroke.marker,
        linestyle="none",
        markersize=MARKER_SIZE,
        clip_on=False,
    )
    return stroke.handle()


@styled
def goodput_against_rate(points: Mapping[str, Sequence[tuple[float, float, float, float]]]) -> Figure | None:
    """For each name: offered rate (requests/s), goodput, and the least and the most of its repeats, as shares of 1.

    Raises:
        ValueError: not 0 ≤ low ≤ goodput ≤ high ≤ 1, or a rate that is not above 0.
    """
    series = {name: sorted(rows) for name, rows in points.items() if rows}
    if not series:
        return None
    figure, axes = new_plot("Goodput against offered rate", "offered rate (requests/s)", "goodput (% of offered)")
    handles: list[Line2D] = []
    for number, (name, rows) in enumerate(series.items()):
        rates, goodput, low, high = np.array([_checked_goodput(name, row) for row in rows]).T
        stroke = Stroke.of(number)
        axes.errorbar(
            rates,
            100 * goodput,
            yerr=100 * np.array([goodput - low, high - goodput]),
            color=stroke.color,
            linestyle=stroke.dash,
            marker=stroke.marker,
            markersize=MARKER_SIZE,
            capsize=5,
            elinewidth=1.4,
        )
        handles.append(stroke.handle())
    scale_axis(axes, "x", *_extremes([row[0] for rows in series.values() for row in rows]))
    axes.set_ylim(0, 104)
    add_legend(figure, handles, list(series))
    return figure


def _checked_goodput(name: str, row: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    rate, goodput, low, high = row
    if not (0 < rate < np.inf and 0 <= low <= goodput <= high <= 1):
        raise ValueError(f"{name}: {row} is no rate with a goodput between its least and its most, from 0 to 1")
    return row


def _extremes(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)
