"""The plots of a report: the loss, other columns of a history, the noise scale, and what a plan chose among."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from anybatch.memory import readable
from anybatch.planning.report import Candidate, Plan
from anybatch.report.drawing import Axis, Plot, axis_of, short, size_axis
from anybatch.report.series import MOST_POINTS, Series, column, drawable, is_rate, smoothed, thinned

WIDE, NARROW = (940, 320), (450, 260)
HOVERS = 60
WORTH_SMOOTHING = 40  # rows; of fewer, one sees every one
LOG_FROM = 30.0  # how many times apart values are that a logarithmic axis shows better
FAR = 4.0  # a budget or batch that many times beyond the curve would press it to the floor

History = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Figure:
    """A plot with its words."""

    name: str
    title: str
    drawings: tuple[str, ...]  # one that fits everywhere, or a wide one and one for narrow screens
    legend: tuple[tuple[str, str], ...] = ()  # (style, label)
    caption: str = ""


@dataclasses.dataclass(frozen=True)
class _Curves:
    """A column as it is drawn: each row, and smoothed if that is worth it."""

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
    """The loss over the steps, with what evaluations say of it; None if there is no curve to be seen."""
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
    # As long as colours tell them apart, as discs; beyond, as lines, whose dashes are seen.
    look = " disc" if len(evaluations) <= len(_COLORS) else ""
    named = [(styles[name] + look, name) for name in evaluations]
    own = _legend(curves, "blue") or ((("blue", "training loss"),) if named else ())
    return Figure("loss", "Loss", tuple(drawings), (*own, *named), _gaps(series))


_COLORS, _DASHES = ("orange", "green", "purple"), ("", "dashed", "dotted", "mixed")
_STYLES = tuple(f"{color} {dash}".strip() for dash in _DASHES for color in _COLORS)


def column_figure(
    history: History, name: str, title: str, *, color: str = "blue", from_zero: bool = False
) -> Figure | None:
    """One column over the steps; None if there is no curve to be seen."""
    series = column(history, name)
    is_evaluation = name.split(".")[0] == "eval"
    series = series.known if is_evaluation else series  # most rows have none, and that is no gap
    if is_rate(name) and not series.is_known[:1].all():
        series = Series(series.steps[1:], series.values[1:])  # nor is it at the first step, before which there is none
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
    """The noise scale over the steps, with the size of the batch; None if there is no curve to be seen."""
    series = column(history, "noise_scale")
    if not _is_curve(series):
        return None
    curves, values = _Curves(series, None), drawable(series.known.values)  # it is smoothed already
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
    """The memory of each candidate against its microbatch size; None if fewer than two are known."""
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
        figure, caption=f"{figure.caption} The budget, {readable(plan.budget)}, is far above.".strip()
    )


def time_figure(plan: Plan) -> Figure | None:
    """The time of each candidate against its microbatch size; None if fewer than two were timed."""
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
    # Those of all candidates, so that memory and time stand beside each other.
    x = size_axis([each.microbatch_size for each in plan.candidates], plan.microbatch_size, "microbatch size")
    text = f"{title} against microbatch size: " + "; ".join(
        f"{each.microbatch_size}: {words(each)}" for each in candidates
    )
    plot = _small(x, axis_of(heights, unit, from_zero=True, padding=0.1), text)
    styles = list(dict.fromkeys(each.style for each in candidates))
    for style, dash in zip(styles, itertools.cycle(_DASHES), strict=False):
        mine = sorted((each for each in candidates if each.style == style), key=lambda each: each.microbatch_size)
        sizes = np.array([each.microbatch_size for each in mine], float)
        plot.curve(Series(sizes, np.array(list(map(height, mine)), float)), f"{color} {dash}".strip())
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
    legend = [
        (f"{color} {dash}".strip(), style or "plain")
        for style, dash in zip(styles, itertools.cycle(_DASHES), strict=False)
    ]
    legend = legend if len(styles) > 1 else []
    if any(is_predicted.values()):
        legend += [(f"{color} disc", "compiled"), (f"{color} disc hollow", "predicted")]
    return Figure(title.lower(), title, (plot.svg(),), tuple(legend))


def _evaluated_losses(history: History) -> list[str]:
    """The evaluations that belong beside the loss: one that has no name, and those called a loss."""
    names = dict.fromkeys(name for row in history for name in row if name.split(".")[0] == "eval")
    return [name for name in names if name == "eval" or name.endswith("loss")]


def drawn_losses(history: History) -> tuple[list[str], list[str]]:
    """The evaluations that are drawn beside the loss, and those for which there are no colours and dashes left."""
    names = _evaluated_losses(history)
    return names[: len(_STYLES)], names[len(_STYLES) :]


def other_columns(history: History) -> list[str]:
    """The evaluations and scalars of aux that are not drawn beside the loss."""
    beside = _evaluated_losses(history)
    names = dict.fromkeys(name for row in history for name in row if name.split(".")[0] in ("eval", "aux"))
    return [name for name in names if name not in beside]


def _draw_points(plot: Plot, series: Series, name: str, color: str) -> None:
    """Each value by itself, if they are not too many to be told apart."""
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
    """For those who do not see the curve."""
    known = series.known
    lowest, highest = int(np.argmin(known.values)), int(np.argmax(known.values))
    return (
        f"{title} from {short(known.values[0])} at step {known.steps[0]:,.0f} to {short(known.values[-1])} at step "
        f"{known.steps[-1]:,.0f}. Lowest {short(known.values[lowest])} at step {known.steps[lowest]:,.0f}, highest "
        f"{short(known.values[highest])} at step {known.steps[highest]:,.0f}."
    )
