"""The map of a capacity sweep: data in, a figure out; None where there is nothing to draw."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pdserve_bench.pages.style import DARK, add_legend, new_plot, styled

_MET_COLOR = "#9BD3F5"
_MISSED_COLOR = "#F6C28B"
_MARGIN = 90.0
_ROW_HEIGHT = 42.0
_MAX_COLUMN_LABELS = 6


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """A load that was tried: interactive requests/s, documents at a time. `limit`: the objective that was missed."""

    interactive_rate: float
    num_documents: int
    met: bool
    limit: str = ""


@styled
def capacity_map(points: Sequence[CapacityPoint]) -> Figure | None:
    """A cell a load: a tick where every objective was met, else the letter of the one that was missed first.

    A load that was tried more than once is met only if it was each time.
    """
    if not points:
        return None
    rates = sorted({point.interactive_rate for point in points})
    documents = sorted({point.num_documents for point in points})
    missed = {(point.interactive_rate, point.num_documents): point.limit for point in points if not point.met}
    letters = {limit: chr(ord("a") + number % 26) for number, limit in enumerate(sorted(set(missed.values())))}
    figure, axes = new_plot(
        "Which loads meet the objectives",
        "interactive rate (requests/s)",
        "documents at a time",
        _MARGIN + _ROW_HEIGHT * len(documents),
    )
    _grid(axes, [f"{rate:.4g}" for rate in rates], [str(number) for number in documents])
    for load in {(point.interactive_rate, point.num_documents): None for point in points}:
        mark = letters[missed[load]] if load in missed else "✓"
        _cell(axes, rates.index(load[0]), documents.index(load[1]), mark, met=load not in missed)
    labels = ["✓: every objective met", *(f"{letter}: {limit or 'missed'}" for limit, letter in letters.items())]
    handles = [_load_patch((0, 0), met=True), *(_load_patch((0, 0), met=False) for _ in letters)]
    add_legend(figure, handles, labels)
    return figure


def _grid(axes: Axes, columns: Sequence[str], rows: Sequence[str]) -> None:
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    step = -(-len(columns) // _MAX_COLUMN_LABELS)
    axes.set_xticks(range(0, len(columns), step), columns[::step])
    axes.set_yticks(range(len(rows)), rows)
    axes.grid(visible=False)


def _cell(axes: Axes, column: int, row: int, mark: str, met: bool) -> None:
    axes.add_patch(_load_patch((column - 0.47, row - 0.45), met))
    axes.text(column, row, mark, ha="center", va="center", color=DARK, fontweight="bold")


def _load_patch(corner: tuple[float, float], met: bool) -> Rectangle:
    return Rectangle(corner, 0.94, 0.9, facecolor=_MET_COLOR if met else _MISSED_COLOR, edgecolor="none")
