"""The figures of a report: the loss, other columns of the history, the noise scale, and the candidates of a plan."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from anybatch.call.memory import readable
from anybatch.planning.plan import Candidate, Plan
from anybatch.report.svg import (
    MOST_POINTS,
    Axis,
    Plot,
    Series,
    axis_of,
    drawable,
    short,
    size_axis,
    thinned,
)

WIDE, NARROW = (940, 320), (450, 260)  # width and height in pixels
HOVERS = 60  # columns of a plot that show their values when the pointer is on them
WORTH_SMOOTHING = 40  # rows; a curve with fewer is not smoothed
LOG_FROM = 30.0  # a vertical axis is logarithmic if the highest value is this many times the lowest
FAR = 4.0  # a budget or batch this many times above the curve is not drawn: it would flatten the curve

# The styles of evaluations that are drawn with the loss.
_COLORS, _DASHES = ("orange", "green", "purple"), ("", "dashed", "dotted", "mixed")
_STYLES = tuple(f"{color} {dash}".strip() for dash in _DASHES for color in _COLORS)

History = Sequence[Mapping[str, Any]]


# Columns of a history.


def number(value: Any) -> float:
    """A cell of a history as a float. NaN if it is not a number.

    >>> number("1.5"), number(None)
    (1.5, nan)
    """
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
            step = number(row.get("step"))
            steps.append(step if math.isfinite(step) else float(place))
            values.append(number(row[name]))
    order = np.argsort(steps, kind="stable")
    array = np.array(values, float)[order]
    return Series(np.array(steps, float)[order], np.where(np.isfinite(array), array, np.nan))


def is_rate(name: str) -> bool:
    """True for a column like `examples_per_second`, which has no value at the first step."""
    return name.endswith("_per_second")


def smoothed(series: Series, share: float = 0.02) -> Series:
    """Smooths a series without a lag, by three moving averages, which are nearly a Gaussian filter. Gaps stay gaps.

    The windows are symmetric and grow with the distance from the first value. A window that reached farther to the
    right would make the curve start too low. One that reached back to the first values, where a loss falls most
    steeply, would keep the curve above the values for long.

    Args:
      series: the curve.
      share: the radius of a window, as a share of the length of the series.
    """
    length = len(series)
    places = np.arange(length)
    radius = np.minimum(places // 4, max(1, round(share * length)))
    first, last = places - radius, np.minimum(places + radius, length - 1)
    values, known = drawable(series.values), series.is_known
    for _ in range(3):
        totals = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
        counts = np.concatenate([[0], np.cumsum(known)])
        # A count of 0 means that the window has only gaps; its center is a gap too.
        values = (totals[last + 1] - totals[first]) / np.maximum(counts[last + 1] - counts[first], 1)
    return Series(series.steps, np.where(known, values, np.nan))


def _evaluated_losses(history: History) -> list[str]:
    """The evaluations that are drawn with the loss: `eval`, and those whose names end in "loss"."""
    names = dict.fromkeys(name for row in history for name in row if name.split(".")[0] == "eval")
    return [name for name in names if name == "eval" or name.endswith("loss")]


def drawn_losses(history: History) -> tuple[list[str], list[str]]:
    """The evaluations that are drawn with the loss, and those left over when all colours and dashes are used."""
    names = _evaluated_losses(history)
    return names[: len(_STYLES)], names[len(_STYLES) :]


def other_columns(history: History) -> list[str]:
    """The evaluations and auxiliary scalars that are not drawn with the loss."""
    with_loss = _evaluated_losses(history)
    names = dict.fromkeys(name for row in history for name in row if name.split(".")[0] in ("eval", "aux"))
    return [name for name in names if name not in with_loss]


# Figures.


@dataclasses.dataclass(frozen=True)
class Figure:
    """A plot with its title, legend and caption."""

    name: str
    title: str
    drawings: tuple[str, ...]  # SVG: one for all screens, or one for wide and one for narrow screens
    legend: tuple[tuple[str, str], ...] = ()  # (style, label)
    caption: str = ""


@dataclasses.dataclass(frozen=True)
class _Curves:
    """The curves of a column: all rows, and the smoothed rows if there are enough of them."""

    each: Series
    smooth: Series | None

    @classmethod
    def of(cls, series: Series) -> "_Curves":
        return cls(series, smoothed(series) if len(series.known) >= WORTH_SMOOTHING else None)

    def draw(self, plot: Plot, most: int, color: str) -> None:
        plot.curve(thinned(self.each, most), f"{color} faint" if self.smooth is not None else color)
        if self.smooth is not None:
            plot.curve(thinned(self.smooth, most // 3), color)

    def hover(self, plot: Plot, name: str) -> None:
        places = np.unique(np.linspace(0, len(self.each) - 1, min(HOVERS, len(self.each))).round().astype(int))
        titles = []
        for place in places:
            title = f"step {self.each.steps[place]:,.0f}\n{name} {short(self.each.values[place])}"
            if self.smooth is not None and self.smooth.is_known[place]:
                title += f"\nsmoothed {short(self.smooth.values[place])}"
            titles.append(title)
        plot.hover(self.each.steps[places], titles)


def loss_figure(history: History) -> Figure | None:
    """The training loss over the steps, with the losses of evaluations. None with fewer than two points."""
    series = column(history, "loss")
    evaluations = {name: column(history, name).known for name in drawn_losses(history)[0]}
    evaluations = {name: found for name, found in evaluations.items() if len(found)}
    styles = dict(zip(evaluations, _STYLES, strict=False))
    if not _is_curve(series):
        return None
    curves = _Curves.of(series)
    everything = np.concatenate([series.known.values, *(found.values for found in evaluations.values())])
    steps = np.concatenate([series.steps, *(found.steps for found in evaluations.values())])
    x, y = axis_of(steps, "step", padding=0), axis_of(everything, "loss", log_from=LOG_FROM)
    drawings = []
    for style, (width, height), most in (("wide", WIDE, MOST_POINTS), ("narrow", NARROW, MOST_POINTS // 2)):
        plot = Plot(x, y, width=width, height=height, text=_in_words("Loss", series))
        curves.draw(plot, most, "blue")
        curves.hover(plot, "loss")
        for name, found in evaluations.items():
            plot.curve(thinned(found, most), styles[name])
            _draw_points(plot, found, name, styles[name].split()[0])
        drawings.append(plot.svg(style))
    # The legend shows discs as long as colours are different, and else lines, to show their dashes.
    look = " disc" if len(evaluations) <= len(_COLORS) else ""
    named = [(styles[name] + look, name) for name in evaluations]
    own = _legend(curves, "blue") or ((("blue", "training loss"),) if named else ())
    return Figure("loss", "Loss", tuple(drawings), (*own, *named), _gaps(series))


def column_figure(
    history: History, name: str, title: str, *, color: str = "blue", from_zero: bool = False
) -> Figure | None:
    """One column over the steps. None with fewer than two points."""
    series = column(history, name)
    is_evaluation = name.split(".")[0] == "eval"
    series = series.known if is_evaluation else series  # rows without an evaluation are not gaps
    if is_rate(name) and not series.is_known[:1].all():
        series = Series(series.steps[1:], series.values[1:])  # nor is the first step, which has no rate
    if not _is_curve(series):
        return None
    curves = _Curves(series, None) if is_evaluation else _Curves.of(series)
    y = axis_of(series.known.values, "", from_zero=from_zero, log_from=LOG_FROM if not from_zero else float("inf"))
    plot = _small(axis_of(series.steps, "step", padding=0), y, _in_words(title, series))
    curves.draw(plot, MOST_POINTS // 2, color)
    curves.hover(plot, name)
    if is_evaluation:
        _draw_points(plot, series, name, color)
    return Figure(name, title, (plot.svg(),), _legend(curves, color), _gaps(series))


def noise_figure(history: History, batch: float | None, unit: str) -> Figure | None:
    """The noise scale over the steps, with the size of the batch. None with fewer than two points."""
    series = column(history, "noise_scale")
    if not _is_curve(series):
        return None
    curves, values = _Curves(series, None), drawable(series.known.values)  # the logged noise scale is smoothed already
    shown = batch is not None and batch <= FAR**2 * values.max() and batch >= values[values > 0].min(initial=1) / FAR**2
    y = axis_of(np.append(values, batch) if shown and batch is not None else values, unit, log_from=LOG_FROM / 3)
    text = _in_words("Gradient noise scale", series) + ("" if batch is None else f" The batch has {batch:,.0f} {unit}.")
    plot = _small(axis_of(series.steps, "step", padding=0), y, text)
    if shown and batch is not None:
        plot.level(batch, f"batch {batch:,.0f}", series)
    curves.draw(plot, MOST_POINTS // 2, "purple")
    curves.hover(plot, "noise scale")
    return Figure("noise_scale", "Gradient noise scale", (plot.svg(),), (), _gaps(series))


def memory_figure(plan: Plan) -> Figure | None:
    """The memory of each candidate against its microbatch size. None if it is known for fewer than two."""
    known = [each for each in plan.candidates if each.total is not None]
    highest = max((each.total or 0 for each in known), default=0)
    unit, name = next(
        ((2**power, name) for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if highest >= 2**power), (1, "B")
    )
    is_near = plan.budget is not None and plan.budget <= FAR * highest
    top = [plan.budget / unit] if is_near and plan.budget is not None else []
    figure = _candidates_figure(
        plan,
        known,
        "Memory",
        name,
        "blue",
        lambda each: (each.total or 0) / unit,
        lambda each: readable(each.total or 0),
        top,
    )
    if figure is None or plan.budget is None or is_near:
        return figure
    return dataclasses.replace(
        figure, caption=f"{figure.caption} The budget, {readable(plan.budget)}, is far above the plot.".strip()
    )


def time_figure(plan: Plan) -> Figure | None:
    """The time of each candidate against its microbatch size. None if fewer than two were timed."""
    timed = [each for each in plan.candidates if each.seconds is not None]

    def milliseconds(each: Candidate) -> float:
        return 1e3 * (each.seconds or 0.0)

    return _candidates_figure(
        plan, timed, "Time", "ms", "orange", milliseconds, lambda each: f"{short(milliseconds(each))} ms"
    )


def _candidates_figure(
    plan: Plan,
    candidates: Sequence[Candidate],
    title: str,
    unit: str,
    color: str,
    height: Callable[[Candidate], float],
    words: Callable[[Candidate], str],
    levels: Sequence[float] = (),
) -> Figure | None:
    if len(candidates) < 2:
        return None
    heights = np.array([*map(height, candidates), *levels])
    # The sizes of all candidates, so that the plots of memory and time have the same axis.
    x = size_axis([each.microbatch_size for each in plan.candidates], plan.microbatch_size, "microbatch size")
    text = f"{title} against microbatch size: " + "; ".join(
        f"{each.microbatch_size}: {words(each)}" for each in candidates
    )
    plot = _small(x, axis_of(heights, unit, from_zero=True, padding=0.1), text)
    variants = list(dict.fromkeys(each.variant for each in candidates))
    styles = [f"{color} {dash}".strip() for _, dash in zip(variants, itertools.cycle(_DASHES), strict=False)]
    for variant, style in zip(variants, styles, strict=True):
        same = sorted((each for each in candidates if each.variant == variant), key=lambda each: each.microbatch_size)
        sizes = np.array([each.microbatch_size for each in same], float)
        plot.curve(Series(sizes, np.array(list(map(height, same)), float)), style)
    for level in levels:
        sizes = np.array([each.microbatch_size for each in candidates], float)
        plot.level(level, f"budget {short(level)} {unit}", Series(sizes, heights[: len(candidates)]))
    is_predicted = {each: each.bytes is None and each.seconds is None for each in candidates}
    for each in candidates:
        is_chosen = each == plan.chosen
        look = f"{color} {'hollow' if is_predicted[each] else ''} {'chosen' if is_chosen else ''}".strip()
        note = f"{each.route}, {each.name}\n{words(each)}" + (", predicted" if is_predicted[each] else "")
        plot.point(each.microbatch_size, height(each), look, note, radius=6 if is_chosen else 4)
    if plan.chosen in candidates and plan.chosen is not None:
        plot.mark(plan.chosen.microbatch_size, "chosen")
    legend = [(style, variant or "plain") for style, variant in zip(styles, variants, strict=True)]
    legend = legend if len(variants) > 1 else []
    if any(is_predicted.values()):
        legend += [(f"{color} disc", "compiled"), (f"{color} disc hollow", "predicted")]
    return Figure(title.lower(), title, (plot.svg(),), tuple(legend))


def _draw_points(plot: Plot, series: Series, name: str, color: str) -> None:
    """Draws each value as a point, unless there are too many to tell apart."""
    if len(series) <= 2 * HOVERS:
        for step, value in zip(series.steps, series.values, strict=True):
            plot.point(step, value, color, f"step {step:,.0f}\n{name} {short(value)}", radius=3.5)


def _is_curve(series: Series) -> bool:
    return len(np.unique(series.known.steps)) > 1


def _small(x: Axis, y: Axis, text: str) -> Plot:
    return Plot(x, y, width=NARROW[0], height=NARROW[1], text=text)


def _legend(curves: _Curves, color: str) -> tuple[tuple[str, str], ...]:
    return () if curves.smooth is None else ((f"{color} faint", "each row"), (color, "smoothed"))


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
