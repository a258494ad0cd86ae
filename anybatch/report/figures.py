"""The figures of a report about training: the loss, other columns of the history, and the noise scale.

They are made of the parts in `anybatch.call.plots`, as those of a plan are (`Plan.figures`), and drawn in SVG by
`anybatch.call.display`. Their elements have classes, to which the style sheet gives the colours of the light or dark
scheme. The text is text, so it can be selected and read aloud.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anybatch.call.plots import HOVERS, Figure, Plot, Series, axis_of, drawable, joined, short, thinned

WIDE, NARROW = (940, 320), (450, 260)  # width and height in pixels
WORTH_SMOOTHING = 40  # rows; a curve with fewer is not smoothed
LOG_FROM = 30.0  # a vertical axis is logarithmic if the highest value is this many times the lowest
FAR = 16.0  # a batch this many times above or below the curve is not drawn: it would flatten the curve

# The styles of evaluations that are drawn with the loss.
_COLORS, _DASHES = ("orange", "green", "purple"), ("", "dashed", "dotted", "mixed")
STYLES = tuple(f"{color} {dash}".strip() for dash in _DASHES for color in _COLORS)

History = Sequence[Mapping[str, Any]]


# Columns of a history.


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def column(history: Sequence[Mapping[str, Any]], name: str) -> Series:
    """A column of a history as a series, sorted by step.

    A row without the column is left out. A value that is None, NaN or infinite is a gap.

    >>> rows = [{"step": 2, "loss": None}, {"step": 1, "loss": 3.0}, {"step": 3}]
    >>> column(rows, "loss").steps.tolist(), column(rows, "loss").values.tolist()
    ([1.0, 2.0], [3.0, nan])
    """
    steps, values = [], []
    for place, row in enumerate(history, start=1):
        if name in row:
            step = _number(row.get("step"))
            steps.append(step if math.isfinite(step) else float(place))
            values.append(_number(row[name]))
    order = np.argsort(steps, kind="stable")
    array = np.array(values, float)[order]
    return Series(np.array(steps, float)[order], np.where(np.isfinite(array), array, np.nan))


def smoothed(series: Series) -> Series:
    """Smooths a series without a lag, by three moving averages, which are nearly a Gaussian filter. Gaps stay gaps.

    The windows are symmetric and grow with the distance from the first value. A window that reached farther to the
    right would make the curve start too low. One that reached back to the first values, where a loss falls most
    steeply, would keep the curve above the values for long.
    """
    length = len(series)
    places = np.arange(length)
    radius = np.minimum(places // 4, max(1, round(0.02 * length)))
    first, last = places - radius, np.minimum(places + radius, length - 1)
    values, known = drawable(series.values), series.is_known
    for _ in range(3):
        totals = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
        counts = np.concatenate([[0], np.cumsum(known)])
        # A count of 0 means that the window has only gaps; its center is a gap too.
        values = (totals[last + 1] - totals[first]) / np.maximum(counts[last + 1] - counts[first], 1)
    return Series(series.steps, np.where(known, values, np.nan))


def is_evaluation(name: str) -> bool:
    """True for `eval` and `eval.*`."""
    return name.split(".")[0] == "eval"


def scalar_columns(history: History) -> tuple[list[str], list[str]]:
    """The evaluations that belong to the loss (`eval`, and those that end in "loss"); all others, and `aux.*`."""
    names = dict.fromkeys(name for row in history for name in row if name.split(".")[0] in ("eval", "aux"))
    losses = [name for name in names if is_evaluation(name) and (name == "eval" or name.endswith("loss"))]
    return losses, [name for name in names if name not in losses]


# Figures.


def loss_figure(history: History) -> Figure | None:
    """The training loss over the steps, with the losses of evaluations. None with fewer than two points."""
    found = [(name, column(history, name).known) for name in scalar_columns(history)[0][: len(STYLES)]]
    known = [(name, series) for name, series in found if len(series)]
    evaluations = [(name, series, style) for (name, series), style in zip(known, STYLES, strict=False)]
    screens = (("wide", WIDE), ("narrow", NARROW))
    series = column(history, "loss")
    return _curve_figure("loss", "Loss", series, "blue", unit="loss", evaluations=evaluations, screens=screens)


def column_figure(
    history: History, name: str, title: str, *, color: str = "blue", from_zero: bool = False
) -> Figure | None:
    """One column over the steps. None with fewer than two points."""
    series = column(history, name)
    if name.endswith("_per_second") and not series.is_known[:1].all():
        series = Series(series.steps[1:], series.values[1:])  # the first step, which has no rate, is not a gap
    if is_evaluation(name):
        series = series.known  # nor are rows without an evaluation
    log_from = math.inf if from_zero else LOG_FROM
    return _curve_figure(name, title, series, color, from_zero=from_zero, log_from=log_from)


def noise_figure(history: History, batch: float | None, unit: str) -> Figure | None:
    """The noise scale over the steps, with the size of the batch. None with fewer than two points."""
    series = column(history, "noise_scale")
    values, level = drawable(series.known.values), None
    if batch is not None and len(values):
        is_near = values[values > 0].min(initial=1) / FAR <= batch <= FAR * values.max()
        level = batch if is_near else None
    title = "Gradient noise scale"
    return _curve_figure("noise_scale", title, series, "purple", unit=unit, level=level, log_from=LOG_FROM / 3)


def _curve_figure(
    name: str,
    title: str,
    series: Series,
    color: str,
    *,
    unit: str = "",
    from_zero: bool = False,
    log_from: float = LOG_FROM,
    evaluations: Sequence[tuple[str, Series, str]] = (),  # (name, values, style)
    level: float | None = None,
    screens: Sequence[tuple[str, tuple[int, int]]] = (("", NARROW),),  # names, and sizes of the plot on them
) -> Figure | None:
    if len(np.unique(series.known.steps)) < 2:
        return None
    # Evaluations are few, and the logged noise scale is smoothed already.
    is_noisy = name != "noise_scale" and not is_evaluation(name) and len(series.known) >= WORTH_SMOOTHING
    smooth = smoothed(series) if is_noisy else None
    others = [values for _, values, _ in evaluations]
    levels = [] if level is None else [level]
    x = axis_of(np.concatenate([each.steps for each in (series, *others)]), "step", padding=0)
    values = np.concatenate([*(each.known.values for each in (series, *others)), levels])
    y = axis_of(values, unit, from_zero=from_zero, log_from=log_from)
    text = _in_words(title, series) + ("" if level is None else f" The batch has {level:,.0f} {unit}.")
    plots = []
    for screen, size in screens:
        plot, width = Plot(x, y, size, text, screen), size[0]
        if level is not None:
            plot.level(level, f"batch {level:,.0f}", series)
        plot.curve(thinned(series, width), color if smooth is None else f"{color} faint")
        if smooth is not None:
            plot.curve(thinned(smooth, width // 3), color)
        plot.hover(series, smooth, name.replace("_", " "))
        if is_evaluation(name):
            _draw_points(plot, series, name, color)
        for other, found, style in evaluations:
            plot.curve(thinned(found, width), style)
            _draw_points(plot, found, other, style.split()[0])
        plots.append(plot)
    return Figure(name, title, tuple(plots), _legend(color, smooth is not None, evaluations), _gaps(series))


def _draw_points(plot: Plot, series: Series, name: str, color: str) -> None:
    """Draws each value as a point, unless there are too many to tell apart."""
    if len(series) <= 2 * HOVERS:
        for step, value in zip(series.steps, series.values, strict=True):
            plot.point(step, value, color, joined(f"step {step:,.0f}", f"{name} {short(value)}"), radius=3.5)


def _legend(color: str, is_smoothed: bool, evaluations: Sequence[tuple[str, Series, str]]) -> tuple[Any, ...]:
    own = [(f"{color} faint", "each row"), (color, "smoothed")] if is_smoothed else [(color, "training loss")]
    # Discs as long as colours are different, and else lines, to show their dashes.
    look = " disc" if len(evaluations) <= len(_COLORS) else ""
    named = [(style + look, name) for name, _, style in evaluations]
    return (*own, *named) if is_smoothed or named else ()


def _gaps(series: Series) -> str:
    missing = len(series) - len(series.known)
    if not missing:
        return ""
    return f"{missing:,} of {len(series):,} rows {'has' if missing == 1 else 'have'} no finite value here."


def _in_words(title: str, series: Series) -> str:
    """What a curve shows, for screen readers."""
    known = series.known
    lowest, highest = int(np.argmin(known.values)), int(np.argmax(known.values))
    return (
        f"{title} from {short(known.values[0])} at step {known.steps[0]:,.0f} to {short(known.values[-1])} at step "
        f"{known.steps[-1]:,.0f}. Lowest {short(known.values[lowest])} at step {known.steps[lowest]:,.0f}, highest "
        f"{short(known.values[highest])} at step {known.steps[highest]:,.0f}."
    )
