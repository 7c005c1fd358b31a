"""Bars of phases and rows of ratios: data in, a figure out; None where there is nothing to draw."""

import math
from collections.abc import Collection, Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from pdserve_bench.pages import text
from pdserve_bench.pages.style import (
    DARK,
    FILL_COLORS,
    GREY,
    HATCHES,
    INK,
    LINE_COLORS,
    LINE_HEIGHT,
    add_legend,
    log_axis,
    new_plot,
    styled,
)

_BAR_HEIGHT = 26.0
_BELOW_BAR = 8.0
_ABOVE_BAR = 5.0
_LABEL_CHARS = 28
_MARGIN = 75.0
"""For the axis and its label; all heights in units of the SVG."""
_LABELLED_SHARE = 0.16
"""Segments of at least this share of the axis have room for their time."""


@styled
def phase_bars(phases_s: Mapping[str, Mapping[str, float]]) -> Figure | None:
    """Where time went: a bar a name, made of its phases' seconds in the order in which they first come.

    Raises:
        ValueError: a time is negative or no number.
    """
    phases = list(dict.fromkeys(phase for parts in phases_s.values() for phase in parts))
    longest_s = max((_total_s(name, parts) for name, parts in phases_s.items()), default=0.0)
    if not longest_s:
        return None
    per_s, unit = (1000.0, "ms") if longest_s < 1 else (1.0, "s")
    figure, axes, rows = _new_rows("Where time went", f"time ({unit})", phases_s)
    axes.set_xlim(0, longest_s * per_s)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    for bar, (name, parts) in zip(rows, phases_s.items(), strict=True):
        _row_label(axes, bar, name, text.seconds(sum(parts.values())))
        begin_s = 0.0
        for number, phase in enumerate(phases):
            length_s = parts.get(phase, 0.0)
            axes.add_patch(_phase_patch((begin_s * per_s, bar), length_s * per_s, number))
            if length_s >= _LABELLED_SHARE * longest_s:
                _segment_label(axes, (begin_s + length_s / 2) * per_s, bar, length_s, number)
            begin_s += length_s
    add_legend(figure, [_phase_patch((0, 0), 1, number) for number in range(len(phases))], phases)
    return figure


def _total_s(name: str, parts: Mapping[str, float]) -> float:
    for phase, length_s in parts.items():
        if not 0 <= length_s < math.inf:
            raise ValueError(f"{name}, {phase}: {length_s} is no time in seconds")
    return sum(parts.values())


def _new_rows(title: str, x_label: str, names: Collection[str]) -> tuple[Figure, Axes, list[float]]:
    """A row a name, the first on top, and where each one's bar begins.

    Names stand above what is drawn, so that they take no width from it.
    """
    num_lines = max(text.wrapped(name, _LABEL_CHARS).count("\n") + 1 for name in names)
    above = num_lines * LINE_HEIGHT + _ABOVE_BAR
    row_height = above + _BAR_HEIGHT + _BELOW_BAR
    figure, axes = new_plot(title, x_label, "", _MARGIN + len(names) * row_height)
    axes.set_ylim(len(names) * row_height, 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    return figure, axes, [row * row_height + above for row in range(len(names))]


def _row_label(axes: Axes, bar: float, name: str, value: str) -> None:
    across = axes.get_yaxis_transform()
    bottom = bar - _ABOVE_BAR
    axes.text(0.0, bottom, text.wrapped(name, _LABEL_CHARS), transform=across, va="bottom")
    axes.text(1.0, bottom, value, transform=across, ha="right", va="bottom", fontweight="bold")


def _phase_patch(corner: tuple[float, float], width: float, number: int) -> Rectangle:
    color, hatch = FILL_COLORS[number % len(FILL_COLORS)], HATCHES[number % len(HATCHES)]
    return Rectangle(corner, width, _BAR_HEIGHT, facecolor=color, hatch=hatch, edgecolor=DARK, linewidth=0.8)


def _segment_label(axes: Axes, at: float, bar: float, length_s: float, number: int) -> None:
    color = FILL_COLORS[number % len(FILL_COLORS)]
    box = {"facecolor": color, "edgecolor": "none", "pad": 1.5}
    axes.text(at, bar + _BAR_HEIGHT / 2, text.seconds(length_s), ha="center", va="center", color=DARK, bbox=box)


@styled
def ratio_chart(
    ratios: Sequence[tuple[str, float | None, float, float]], title: str = "Apart ÷ colocated"
) -> Figure | None:
    """For each figure its ratio, and the band of ratios that noise alone makes; a hollow mark is within its band.

    A ratio that is None, 0 or infinite is named and not drawn.

    Raises:
        ValueError: a band is not 0 < low ≤ high, or a ratio is negative or no number.
    """
    if not ratios:
        return None
    _check_ratios(ratios)
    figure, axes, rows = _new_rows(title, "ratio (logarithmic)", [name for name, *_ in ratios])
    drawn = [value for _, ratio, low, high in ratios for value in (ratio, low, high) if value and value < math.inf]
    log_axis(axes, "x", min(0.8, *drawn) / 1.2, max(1.25, *drawn) * 1.2)
    axes.axvline(1.0, color=INK, linewidth=1.2)
    for bar, (name, ratio, low, high) in zip(rows, ratios, strict=True):
        _row_label(axes, bar, name, text.ratio(ratio))
        axes.add_patch(Rectangle((low, bar), high - low, _BAR_HEIGHT, facecolor=GREY, alpha=0.45, linewidth=0))
        if ratio and ratio < math.inf:
            axes.add_line(_ratio_mark(ratio, bar + _BAR_HEIGHT / 2, within=low <= ratio <= high))
    marks: list[Artist] = [_ratio_mark(1, 0, within=within) for within in (False, True)]
    handles = [*marks, Patch(facecolor=GREY, alpha=0.45)]
    add_legend(figure, handles, ["a difference", "none: within the noise", "noise band of equal runs"])
    return figure


def _check_ratios(ratios: Sequence[tuple[str, float | None, float, float]]) -> None:
    for name, ratio, low, high in ratios:
        if not 0 < low <= high < math.inf:
            raise ValueError(f"{name}: {low} to {high} is no band of ratios")
        if ratio is not None and not ratio >= 0:
            raise ValueError(f"{name}: {ratio} is no ratio")


def _ratio_mark(ratio: float, at: float, within: bool) -> Line2D:
    color = LINE_COLORS[0]
    marker, fill = ("o", "none") if within else ("D", color)
    return Line2D(
        [ratio],
        [at],
        color=color,
        marker=marker,
        markersize=11,
        markerfacecolor=fill,
        markeredgewidth=2.2,
        linestyle="",
    )
