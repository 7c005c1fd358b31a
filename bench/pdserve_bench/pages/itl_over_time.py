"""The gaps between tokens in the course of a run, and the long prompts that came: a run in, a figure out."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pdserve_bench.load.records import RequestRecord, RunResult
from pdserve_bench.pages import thinning
from pdserve_bench.pages.style import INK, LINE_COLORS, add_legend, fit_axis, new_plot, styled
from pdserve_bench.pages.text import count, objective_s, seconds
from pdserve_bench.pages.thinning import Floats

_MAX_ARRIVALS = 300


@styled
def itl_over_time(
    run: RunResult,
    *,
    prefill_class: str | None = None,
    min_prompt_tokens: int = 1024,
    slo_s: float | None = None,
    range_s: tuple[float, float] | None = None,
) -> Figure | None:
    """Each gap between tokens of interactive requests, when it ended, with the arrivals of long prompts marked.

    Of very many gaps only the longest of each slot of time is drawn.

    Args:
        prefill_class: the class of the long prompts; None: those of at least `min_prompt_tokens`.
        slo_s: drawn as a horizontal line.
        range_s: least and largest gap that the axis holds, so that two runs can be compared; None: the run's own.
    """
    long = [record for record in run.records if _is_long(record, prefill_class, min_prompt_tokens)]
    at_s, gaps_s = _gaps([record for record in run.records if not _is_long(record, prefill_class, min_prompt_tokens)])
    if not gaps_s.size:
        return None
    figure, axes = new_plot(f"ITL over time: {run.name}", "time since the run began (s)", "gap between tokens (ms)")
    low = fit_axis(axes, "y", 1000 * np.array([*gaps_s, *(range_s or ()), *([] if slo_s is None else [slo_s])]))
    axes.set_xlim(0, max(run.duration_s, float(at_s.max())))
    entries = [_draw_gaps(axes, at_s, gaps_s, low)]
    if long:
        entries.append(_mark_arrivals(axes, [record.scheduled_s for record in long]))
    if slo_s is not None:
        line = axes.axhline(1000 * slo_s, color=INK, linewidth=1.4, linestyle=(0, (2, 2)))
        entries.append((line, f"objective: {objective_s(slo_s)}"))
    add_legend(figure, [handle for handle, _ in entries], [label for _, label in entries])
    return figure


def _is_long(record: RequestRecord, prefill_class: str | None, min_prompt_tokens: int) -> bool:
    if prefill_class is not None:
        return record.request_class == prefill_class
    return record.num_prompt_tokens >= min_prompt_tokens


def _gaps(records: Sequence[RequestRecord]) -> tuple[Floats, Floats]:
    """Between neighbouring events of each request: when each ended, and how long it was, in seconds."""
    times = [np.array([event.at_s for event in record.events]) for record in records if len(record.events) > 1]
    if not times:
        return np.empty(0), np.empty(0)
    return np.concatenate([at_s[1:] for at_s in times]), np.concatenate([np.diff(at_s) for at_s in times])


def _draw_gaps(axes: Axes, at_s: Floats, gaps_s: Floats, low: float) -> tuple[Line2D, str]:
    at_s, gaps_s, slot_s = thinning.worst_per_slot(at_s, gaps_s)
    shown = np.maximum(1000 * gaps_s, low)
    (dots,) = axes.plot(at_s, shown, ".", color=LINE_COLORS[0], markersize=8, markeredgewidth=0, alpha=0.75)
    return dots, f"longest gap in each {seconds(slot_s)}" if slot_s else "a gap between two tokens"


def _mark_arrivals(axes: Axes, arrivals_s: Sequence[float]) -> tuple[Line2D, str]:
    """Ticks on the axis of time, and a faint line above each; of very many, one a slot."""
    color = LINE_COLORS[1]
    slot_s = axes.get_xlim()[1] / _MAX_ARRIVALS
    shown = sorted({round(at_s / slot_s): at_s for at_s in sorted(arrivals_s, reverse=True)}.values())
    across = axes.get_xaxis_transform()
    axes.vlines(shown, 0, 1, color=color, linewidth=0.8, alpha=0.3, transform=across)
    axes.vlines(shown, 0, 0.07, color=color, linewidth=2.2, transform=across)
    handle = Line2D([], [], color=color, marker="|", markersize=14, markeredgewidth=2.2, linestyle="none")
    return handle, f"a long prompt arrives ({count(len(arrivals_s))})"
