"""How every plot looks: sizes for a phone, a palette for the colour-blind, strokes, axes, legends. Holds no data."""

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.typing import LineStyleType
from numpy.typing import NDArray

from pdserve_bench.pages.text import plain, wrapped

WIDTH = 380.0
"""Of every plot, in units of its SVG, which a phone shows at nearly one CSS pixel each."""
FONT_SIZE = 15.5
"""In the same units: no less than 14 pixels on a phone 360 wide."""
MARKER_SIZE = 8.0
INK = "#000000"
"""Follows the page's text in dark mode."""
DARK = "#111111"
"""Text upon a fill; stays dark."""
GREY = "#808080"
LINE_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B58900")
FILL_COLORS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#D55E00", "#BBBBBB")
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "oo")

_DASHES: tuple[LineStyleType, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LABEL_CHARS = 34
LINE_HEIGHT = 1.35 * FONT_SIZE
_MAX_TICKS = 5
_LOG_FROM_RANGE = 50.0

styled = mpl.rc_context(
    {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": FONT_SIZE,
        "axes.titlesize": FONT_SIZE,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelsize": FONT_SIZE,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.unicode_minus": True,
        "xtick.labelsize": FONT_SIZE,
        "ytick.labelsize": FONT_SIZE,
        "legend.fontsize": FONT_SIZE,
        "legend.frameon": False,
        "text.parse_math": False,
        "text.usetex": False,
        "lines.linewidth": 2.2,
        "hatch.linewidth": 0.7,
        "figure.autolayout": False,
        "figure.constrained_layout.w_pad": 0.09,
        "figure.constrained_layout.use": False,
    }
)
"""Around every function that draws, so that whatever else uses matplotlib in this process is left alone."""


@dataclass(frozen=True, slots=True)
class Stroke:
    """Tells one line from the others by colour, and by dash and marker where colours are not seen."""

    color: str
    dash: LineStyleType
    marker: str

    @staticmethod
    def of(number: int) -> "Stroke":
        return Stroke(
            LINE_COLORS[number % len(LINE_COLORS)], _DASHES[number % len(_DASHES)], _MARKERS[number % len(_MARKERS)]
        )

    def handle(self) -> Line2D:
        """For a legend."""
        return Line2D([], [], color=self.color, linestyle=self.dash, marker=self.marker, markersize=MARKER_SIZE)


def new_plot(title: str, x_label: str, y_label: str, height: float = 270.0) -> tuple[Figure, Axes]:
    """`height`: without title and legend, in units of the SVG."""
    heading = wrapped(title, _LABEL_CHARS)
    lines = heading.count("\n") + 1
    figure = Figure((WIDTH / 72, (height + lines * LINE_HEIGHT) / 72), dpi=72, layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(heading, x=0.02, ha="left", fontsize=FONT_SIZE, fontweight="bold")
    axes.set_xlabel(plain(x_label))
    axes.set_ylabel(plain(y_label))
    axes.grid(color=GREY, alpha=0.3, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def add_legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Under the plot, an entry a line; the figure grows by it. This ends a plot: all finds its place, and keeps it."""
    texts = [wrapped(label, _LABEL_CHARS) for label in labels]
    lines = sum(text.count("\n") + 1 for text in texts)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + (lines + 0.6) * LINE_HEIGHT / 72)
    figure.legend(handles, texts, loc="outside lower left", handlelength=2.6, borderaxespad=0.2, labelspacing=0.35)
    with missing_glyphs_allowed():
        figure.draw_without_rendering()
    # Laying it out anew at each drawing would move it by fractions of a pixel, and no two files would be equal.
    figure.set_layout_engine("none")


@contextmanager
def missing_glyphs_allowed() -> Generator[None]:
    """A character that our font lacks is the reader's font's to show, or a box in a PNG: no reason to stop a report."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def fit_axis(axes: Axes, which: Literal["x", "y"], values: NDArray[np.float64]) -> float:
    """The axis fits all `values`. Returns where it begins, which is where a 0 is drawn."""
    positive = values[values > 0]
    low, high = (positive.min(), positive.max()) if positive.size else (1.0, 1.0)
    logarithmic = scale_axis(axes, which, float(low), float(high))
    return float(low) / 1.15 if logarithmic else 0.0


def scale_axis(axes: Axes, which: Literal["x", "y"], low: float, high: float) -> bool:
    """Linear from 0, or logarithmic where `high` is over 50 times `low` (> 0). Returns whether it is logarithmic."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    set_limits = axes.set_xlim if which == "x" else axes.set_ylim
    if high > _LOG_FROM_RANGE * low:
        log_axis(axes, which, low / 1.15, high * 1.15)
        return True
    set_limits(0.0, high * 1.05 if high > 0 else 1.0)
    axis.set_major_locator(MaxNLocator(_MAX_TICKS))
    _plain_numbers(axis)
    return False


def log_axis(axes: Axes, which: Literal["x", "y"], low: float, high: float) -> None:
    """With few ticks, at plain numbers."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)
    axis.set_major_locator(FixedLocator(log_ticks(low, high)))
    axis.set_minor_locator(NullLocator())
    _plain_numbers(axis)


def log_ticks(low: float, high: float) -> list[float]:
    """At most six round numbers between them, both above 0."""
    exponents = range(-12, 13)
    for steps, stride in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 4)):
        ticks = [step * 10.0**exponent for exponent in exponents[::stride] for step in steps]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= _MAX_TICKS + 1:
            return inside
    return inside


def _plain_numbers(axis: Axis) -> None:
    axis.set_major_formatter(FuncFormatter(_tick))


def _tick(value: float, _position: int | None) -> str:
    return f"{value:,.6g}".replace(",", "\u202f")
