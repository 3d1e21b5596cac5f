"""Pictures of a run: small multiples of its metrics, drawn from metrics.jsonl.

CU-1: a picture is replaced whole or not at all, so that a viewer never sees half of one.
CU-2: a metric that a run does not have is left out; a panel without any is not drawn, a run without panels has no file.
CU-3: no global state of matplotlib is touched, and it is imported only when something is drawn.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from runtime.journal import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT, GRID = "#1f2328", "#6e7781", "#e6e8eb"
DECADES = 5
"""Of a logarithmic axis; what is smaller is drawn at its lower edge: one tiny value must not flatten the others."""
SMALLEST = 1e-12
"""And never below this: 0 has no logarithm."""
LINE = 12.0
"""Points between the names of two lines."""
UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))
"""Of time along the upper edge, in seconds; the first of which a run took two."""
COLOURS = ("#0969da", "#d1570a", "#1a7f37", "#8250df", "#bf3989")


class Series(msgspec.Struct, frozen=True):
    """One line of a panel."""

    key: str
    label: str = ""
    low: str = ""
    """Key of the lower end of a band around the line, if there is one."""
    high: str = ""


class Panel(msgspec.Struct, frozen=True):
    """One small picture."""

    title: str
    series: tuple[Series, ...]
    log: bool = False
    smooth: bool = True
    """Draw a running mean over the points; for numbers of every step, which are noisy."""
    bottom: float | None = None
    """The y axis reaches at least down to this."""
    top: float | None = None
    """And up to this; further where a value does."""


Points = tuple[list[float], list[float]]


def draw(folder: str | Path, panels: Sequence[Panel], *, title: str = "", name: str = "curves.png") -> Path | None:
    """Draw `folder/metrics.jsonl` as `folder/name`; the first panel is the wide one.

    Returns:
        The file; None when no panel has a value yet (CU-2).
    """
    folder = Path(folder)
    rows = read_metrics(folder)
    shown = [panel for panel in panels if any(_points(rows, series.key)[0] for series in panel.series)]
    if not shown:
        return None

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 3
    lower = -(-(len(shown) - 1) // columns)
    figure = Figure(figsize=(11, 3.9 + 2.15 * lower))
    figure.set_layout_engine("constrained", w_pad=0.12)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1 + lower, columns, height_ratios=[1.6] + [1.0] * lower)
    for index, panel in enumerate(shown):
        place = grid[0, :] if index == 0 else grid[1 + (index - 1) // columns, (index - 1) % columns]
        axes = figure.add_subplot(place)
        _draw_panel(axes, panel, rows)
        if index == 0:
            _add_times(axes, rows)
    figure.suptitle(title or folder.name, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    path = folder / name
    partial = path.with_name(f".{name}.{os.getpid()}.png")
    try:
        figure.savefig(partial, dpi=140, facecolor="white")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _points(rows: Sequence[dict[str, Any]], key: str) -> Points:
    pairs = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), (int, float))]
    return [float(step) for step, _ in pairs], [float(value) for _, value in pairs]


def _draw_panel(axes: Axes, panel: Panel, rows: Sequence[dict[str, Any]]) -> None:
    axes.set_title(panel.title, loc="left", fontsize=10, color=INK)
    ends: list[tuple[float, float, str, str]] = []
    """(step, value, text, colour) behind the last point of a line."""
    for colour, series in zip(COLOURS, panel.series, strict=False):
        steps, values = _points(rows, series.key)
        if not steps:
            continue
        if panel.log:
            floor = max(max(values) * 10.0**-DECADES, SMALLEST)
            values = [max(value, floor) for value in values]
        if panel.smooth and len(values) >= 20:
            axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
            axes.plot(steps, smoothed(values), color=colour, linewidth=1.8)
        else:
            marker = "o" if len(values) <= 40 else ""
            axes.plot(steps, values, color=colour, linewidth=1.8, marker=marker, markersize=4, clip_on=False)
        low, high = _points(rows, series.low), _points(rows, series.high)
        if low[0] and low[0] == high[0]:
            axes.fill_between(low[0], low[1], high[1], color=colour, alpha=0.12, linewidth=0)
        if series.label:
            ends.append((steps[-1], values[-1], f"{series.label} {values[-1]:.3g}", colour))
    if panel.log:
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}")
    _set_range(axes, panel)
    _name_lines(axes, ends)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", labelsize=8, labelcolor=FAINT, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)


def _set_range(axes: Axes, panel: Panel) -> None:
    """At least what the panel asks for, and every value."""
    low, high = axes.dataLim.intervaly
    if panel.bottom is not None:
        axes.set_ylim(bottom=panel.bottom if low >= panel.bottom else None)
    if panel.top is not None:
        axes.set_ylim(top=panel.top if high <= panel.top else None)


def _name_lines(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """The names of lines behind their ends, moved apart where they would cover each other. For linear axes."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    low, high = axes.get_ylim()
    height = axes.get_position().height * figure.get_figheight() * 72  # points, before the layout is final
    lowest = -math.inf
    for step, value, text, colour in sorted(ends, key=lambda end: end[1]):
        natural = (value - low) / (high - low) * height
        place = max(natural, lowest)
        lowest = place + LINE
        axes.annotate(
            text,
            (step, value),
            xytext=(6, place - natural),
            textcoords="offset points",
            color=colour,
            fontsize=9,
            va="center",
            annotation_clip=False,
        )


def _add_times(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """The time along the upper edge: steps aren't equally long, so marks stand where the minutes (or so) fell."""
    steps, elapsed = _points(rows, "elapsed")
    if len(steps) < 2 or elapsed[-1] <= elapsed[0]:
        return
    size, unit = next(((size, unit) for size, unit in UNITS if elapsed[-1] >= 2 * size), UNITS[-1])
    times = [seconds / size for seconds in elapsed]
    gap = _round_up(times[-1] / 8)
    marks = [gap * n for n in range(1, int(times[-1] / gap) + 1) if gap * n >= times[0]]
    at = [_interpolate(mark, times, steps) for mark in marks]
    axes.set_xlabel("step", fontsize=8, color=FAINT)
    upper = axes.secondary_xaxis("top")
    upper.set_xticks(at, [f"{mark:g} {unit}" for mark in marks])
    upper.tick_params(labelsize=8, colors=FAINT, length=0)
    upper.spines["top"].set_visible(False)


def smoothed(values: Sequence[float]) -> list[float]:
    """A running mean over about a tenth of the curve, centred so that it does not lag; narrower towards the ends."""
    reach = max(1, len(values) // 20)
    result: list[float] = []
    for index in range(len(values)):
        half = min(reach, index, len(values) - 1 - index)
        window = values[index - half : index + half + 1]
        result.append(sum(window) / len(window))
    return result


def _interpolate(at: float, known: Sequence[float], values: Sequence[float]) -> float:
    for (a, b), (x, y) in zip(pairwise(known), pairwise(values), strict=True):
        if at <= b:
            return x if b == a else x + (y - x) * max(0.0, at - a) / (b - a)
    return values[-1]


def _round_up(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= value)
