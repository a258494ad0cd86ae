"""The figures of a report: the loss, other columns of the history, the noise scale, and the candidates of a plan.

The template of the page (`page.html.jinja`) draws them in SVG without ids, scripts or fonts. Their elements have
classes, to which the style sheet gives the colours of the light or dark scheme. The text is text, so it can be selected
and read aloud.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anybatch.call.memory import readable
from anybatch.planning.plan import Candidate, Plan

LARGEST = 1e100  # values beyond it, or below its inverse, would overflow in differences and ratios

CHARACTER = 6.8  # the width of a digit on an axis, in pixels; see `svg text` in the style sheet
RIGHT, BOTTOM = 16, 42  # margins, in pixels


@dataclasses.dataclass(frozen=True, eq=False)
class Series:
    """A curve: a value for each step. NaN is a gap."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def is_known(self) -> np.ndarray:
        """A mask: False at gaps."""
        return np.isfinite(self.values)

    @property
    def known(self) -> "Series":
        """The series without its gaps."""
        return Series(self.steps[self.is_known], self.values[self.is_known])

    def __len__(self) -> int:
        return len(self.steps)


def drawable(values: np.ndarray) -> np.ndarray:
    """The values, clipped so that they can be added and divided without overflow. Tiny values become 0.

    >>> drawable(np.array([1e300, 2.0, 1e-300])).tolist()
    [1e+100, 2.0, 0.0]
    """
    return np.where(np.abs(values) < 1 / LARGEST, 0.0, np.clip(values, -LARGEST, LARGEST))


def thinned(series: Series, most: int = 1000) -> Series:
    """The series with about `most` points at most: the lowest and the highest of each interval, so that spikes stay.

    The first interval is divided further, into intervals that double in length. A loss falls most steeply there, and
    one straight line over the interval would lie above the values.

    >>> long = Series(np.arange(100_000.0), np.zeros(100_000))
    >>> long.values[777] = 5.0
    >>> len(thinned(long)) <= 1002, float(thinned(long).values.max())
    (True, 5.0)
    """
    if len(series) <= most:
        return series
    kept = {0, len(series) - 1}
    known = series.is_known
    first_edges = 2 ** np.arange(int(math.log2(2 * len(series) / most)))
    edges = np.union1d(np.linspace(0, len(series), most // 2 + 1 - len(first_edges)).astype(int), first_edges)
    for start, stop in itertools.pairwise(edges):
        places = start + np.flatnonzero(known[start:stop])
        if len(places):
            values = series.values[places]
            kept |= {int(places[np.argmin(values)]), int(places[np.argmax(values)])}
        else:
            kept.add(int(start))  # one point of a gap, so that the gap is drawn
    places = np.array(sorted(kept))
    return Series(series.steps[places], series.values[places])


# Numbers and texts.


def short(value: float) -> str:
    """A number with four digits at most.

    >>> short(0.03125), short(1234567.0), short(1e-7)
    ('0.03125', '1,234,567', '10⁻⁷')
    """
    if not math.isfinite(value):
        return "not finite"
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    power = f"10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    return power if mantissa == "1" else f"{mantissa}\N{MULTIPLICATION SIGN}{power}"


_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

# Characters that are shown as their code: control characters, which an untrained model writes, and characters that
# change the direction of writing, which would make a line look like another one.
_CODES = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}
_CODES |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def visible(text: str) -> str:
    r"""The text with invisible characters replaced by their codes.

    >>> print(visible("a\x00b\u202ec"))
    a\x00b\u202ec
    """
    return text.replace("\r\n", "\n").translate(_CODES)


# Axes.


@dataclasses.dataclass(frozen=True)
class Axis:
    """The range of an axis, and its ticks as (value, name)."""

    low: float
    high: float
    label: str
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    def place(self, values: np.ndarray) -> np.ndarray:
        """The positions of values on the axis: 0 at `low`, 1 at `high`."""
        values, low, high = drawable(values), self.low, self.high
        if self.is_log:
            values, low, high = np.log(np.maximum(values, low)), math.log(low), math.log(high)
        return (values - low) / (high - low)


def axis_of(
    values: np.ndarray, label: str, *, from_zero: bool = False, padding: float = 0.05, log_from: float = math.inf
) -> Axis:
    """An axis that shows all values. It is logarithmic if they are positive and `max / min >= log_from`."""
    values = drawable(values)
    low, high = float(np.min(values)), float(np.max(values))
    if low > 0 and high / low >= log_from:
        stretch = (high / low) ** padding
        low, high = low / stretch, high * stretch
        return Axis(low, high, label, _log_ticks(low, high), is_log=True)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    # A flat line needs a range too, in which the ticks have different names.
    largest = max(abs(low), abs(high))
    is_flat = high - low <= 1e-6 * largest
    margin = 0.1 * largest or 1.0 if is_flat else padding * (high - low)
    low, high = low if from_zero and low == 0 and not is_flat else low - margin, high + margin
    return Axis(low, high, label, _linear_ticks(low, high))


def size_axis(sizes: Sequence[int], chosen: int | None, label: str) -> Axis:
    """A logarithmic axis whose ticks are the sizes themselves. Sizes too close to another tick get none."""
    ticks = [] if chosen is None else [chosen]
    ends = {min(sizes), max(sizes)}
    apart = max((max(sizes) / min(sizes)) ** 0.12, 1.2)
    for size in sorted(set(sizes), key=lambda size: (size not in ends, size & (size - 1) != 0, size)):
        if all(max(size / tick, tick / size) > apart for tick in ticks):
            ticks.append(size)
    stretch = max(max(sizes) / min(sizes), 2.0) ** 0.06
    named = tuple((float(tick), f"{tick:,}") for tick in sorted(ticks))
    return Axis(min(sizes) / stretch, max(sizes) * stretch, label, named, is_log=True)


def _linear_ticks(low: float, high: float, most: int = 6) -> tuple[tuple[float, str], ...]:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in (1, 2, 2.5, 5, 10) if nice * power >= 0.999 * rough)
    numbers = [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
    decimals = len(f"{step:.12f}".rstrip("0").partition(".")[2])
    is_short = step < 1e-4 or decimals > 4 or max(abs(low), abs(high)) >= 1e7
    return tuple((number, short(number) if is_short else f"{number:,.{decimals}f}") for number in numbers)


def _log_ticks(low: float, high: float) -> tuple[tuple[float, str], ...]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1,) if last - first > 3 else (1, 3) if last - first > 2 else (1, 2, 5)
    stride = max(1, math.ceil((last - first) / 8))
    numbers = [factor * 10.0**power for power in range(first, last + 1, stride) for factor in factors]
    return tuple((number, short(number)) for number in numbers if low <= number <= high)


# Plots.


class Plot:
    """One plot: curves, points and levels over two axes, in pixels. The template draws it.

    `text` is what it shows in words, for screen readers. If `screen` is "wide" or "narrow", only those screens show it.
    """

    def __init__(self, x: Axis, y: Axis, size: tuple[int, int], text: str, screen: str = "") -> None:
        self.x, self.y, self.text, self.screen = x, y, text, screen
        self.width, self.height = size
        self.left = round(14 + CHARACTER * max((len(name) for _, name in y.ticks), default=1), 1)
        self.right, self.top, self.bottom = self.width - RIGHT, 28 if y.label else 12, self.height - BOTTOM
        self.x_ticks = [(self.across(value), name) for value, name in x.ticks]
        self.y_ticks = [(self.down(value), name) for value, name in y.ticks]
        self.bands: list[tuple[float, str, str]] = []  # (x, label, anchor of the label)
        self.levels: list[tuple[float, str, str, float, float]] = []  # (y, label, its anchor, its x, its y)
        self.curves: list[tuple[str, str]] = []  # (style, path)
        self.hovers: list[tuple[float, float, str]] = []  # (x, width, title)
        self.points: list[tuple[float, float, float, str, str]] = []  # (x, y, radius, style, title)

    def across(self, values: Any) -> Any:
        return (self.left + self.x.place(np.asarray(values)) * (self.right - self.left)).round(1).tolist()

    def down(self, values: Any) -> Any:
        return (self.bottom - self.y.place(np.asarray(values)) * (self.bottom - self.top)).round(1).tolist()

    def curve(self, series: Series, style: str) -> None:
        """Draws a line through the values, interrupted at gaps. A value between two gaps is a dot."""
        path, is_down = [], False
        known = series.is_known
        across, down = self.across(series.steps), self.down(series.values)
        for place in range(len(series)):
            if known[place]:
                # A line of length 0 is drawn as a dot, since lines have round ends.
                alone = not is_down and (place + 1 == len(series) or not known[place + 1])
                path.append(f"{'L' if is_down else 'M'}{across[place]} {down[place]}{'h0' if alone else ''}")
            is_down = bool(known[place])
        self.curves.append((style, "".join(path)))

    def point(self, x: float, y: float, style: str, title: str, radius: float = 4) -> None:
        """Draws a disc, with a title that is shown when the pointer is on it."""
        self.points.append((self.across(x), self.down(y), radius, style, title))

    def level(self, y: float, label: str, curve: Series) -> None:
        """Draws a horizontal line. Its label goes to the one of its four corners that is farthest from the curve."""
        known, down = curve.known, self.down(y)
        places, heights = self.x.place(known.steps), np.array(self.down(known.values))
        corners = []
        for side, across, is_near in (("start", self.left + 4, places < 0.35), ("end", self.right - 4, places > 0.65)):
            for below in (-7, 16):
                free = np.abs(heights[is_near] - (down + below - 4)).min(initial=self.height)
                corners.append((self.top + 10 < down + below < self.bottom, free, side, across, down + below))
        self.levels.append((down, label, *max(corners)[2:]))

    def band(self, x: float, label: str) -> None:
        """Draws a vertical band behind everything else, with its label at the top."""
        across = self.across(x)
        anchor = "start" if across < self.left + 60 else "end" if across > self.right - 60 else "middle"
        self.bands.append((across, label, anchor))

    def hover(self, series: Series, smooth: Series | None, name: str) -> None:
        """Adds invisible columns around some steps, whose values are shown when the pointer is on them."""
        places = np.unique(np.linspace(0, len(series) - 1, min(HOVERS, len(series))).round().astype(int))
        across = np.array(self.across(series.steps[places]))
        edges = [self.left, *((across[:-1] + across[1:]) / 2).round(1).tolist(), self.right]
        for place, (start, stop) in zip(places, itertools.pairwise(edges), strict=True):
            title = f"step {series.steps[place]:,.0f}\n{name} {short(series.values[place])}"
            if smooth is not None and smooth.is_known[place]:
                title += f"\nsmoothed {short(smooth.values[place])}"
            self.hovers.append((start, round(max(stop - start, 0.0), 1), title))


WIDE, NARROW = (940, 320), (450, 260)  # width and height in pixels
HOVERS = 60  # columns of a plot that show their values when the pointer is on them
WORTH_SMOOTHING = 40  # rows; a curve with fewer is not smoothed
LOG_FROM = 30.0  # a vertical axis is logarithmic if the highest value is this many times the lowest
FAR = 4.0  # a budget or batch this many times above the curve is not drawn: it would flatten the curve

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


@dataclasses.dataclass(frozen=True)
class Figure:
    """A plot with its title, legend and caption."""

    name: str
    title: str
    plots: tuple[Plot, ...]  # one for all screens, or one for wide and one for narrow screens
    legend: tuple[tuple[str, str], ...] = ()  # (style, label)
    caption: str = ""


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
        is_near = values[values > 0].min(initial=1) / FAR**2 <= batch <= FAR**2 * values.max()
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


def memory_figure(plan: Plan) -> Figure | None:
    """The memory of each candidate against its microbatch size. None if it is known for fewer than two."""
    totals = {each: each.total for each in plan.candidates if each.total is not None}
    highest = max(totals.values(), default=0)
    unit = readable(highest).split()[1]
    factor = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    heights = {each: total / factor for each, total in totals.items()}
    words = {each: readable(total) for each, total in totals.items()}
    level, caption = None, ""
    if plan.budget is not None and plan.budget <= FAR * highest:
        level = plan.budget / factor
    elif plan.budget is not None:
        caption = f"The budget, {readable(plan.budget)}, is far above the plot."
    return _candidates_figure(plan, "Memory", unit, "blue", heights, words, level, caption)


def time_figure(plan: Plan) -> Figure | None:
    """The time of each candidate against its microbatch size. None if fewer than two were timed."""
    heights = {each: 1e3 * each.seconds for each in plan.candidates if each.seconds is not None}
    words = {each: f"{short(height)} ms" for each, height in heights.items()}
    return _candidates_figure(plan, "Time", "ms", "orange", heights, words)


def _candidates_figure(
    plan: Plan,
    title: str,
    unit: str,
    color: str,
    heights: Mapping[Candidate, float],
    words: Mapping[Candidate, str],
    level: float | None = None,
    caption: str = "",
) -> Figure | None:
    if len(heights) < 2:
        return None
    # The sizes of all candidates, so that the plots of memory and time have the same axis.
    x = size_axis([each.microbatch_size for each in plan.candidates], plan.microbatch_size, "microbatch size")
    y = axis_of(np.array([*heights.values(), level or 0.0]), unit, from_zero=True, padding=0.1)
    spoken = "; ".join(f"{each.microbatch_size}: {text}" for each, text in words.items())
    plot = Plot(x, y, NARROW, f"{title} against microbatch size: {spoken}")
    styles: dict[str, str] = {}
    for variant, dash in zip(dict.fromkeys(each.variant for each in heights), itertools.cycle(_DASHES), strict=False):
        styles[variant] = f"{color} {dash}".strip()
        same = sorted((each.microbatch_size, height) for each, height in heights.items() if each.variant == variant)
        plot.curve(Series(*np.array(same, float).T), styles[variant])
    if level is not None:
        everything = np.array([(each.microbatch_size, height) for each, height in heights.items()], float)
        plot.level(level, f"budget {short(level)} {unit}", Series(*everything.T))
    predicted = [each for each in heights if each.bytes is None and each.seconds is None]
    for each, height in heights.items():
        is_chosen = each == plan.chosen
        look = f"{color} {'hollow' if each in predicted else ''} {'chosen' if is_chosen else ''}".strip()
        note = f"{each.route}, {each.name}\n{words[each]}" + (", predicted" if each in predicted else "")
        plot.point(each.microbatch_size, height, look, note, radius=6 if is_chosen else 4)
        if is_chosen:
            plot.band(each.microbatch_size, "chosen")
    legend = [(style, variant or "plain") for variant, style in styles.items()] if len(styles) > 1 else []
    if predicted:
        legend += [(f"{color} disc", "compiled"), (f"{color} disc hollow", "predicted")]
    return Figure(title.lower(), title, (plot,), tuple(legend), caption)


def _draw_points(plot: Plot, series: Series, name: str, color: str) -> None:
    """Draws each value as a point, unless there are too many to tell apart."""
    if len(series) <= 2 * HOVERS:
        for step, value in zip(series.steps, series.values, strict=True):
            plot.point(step, value, color, f"step {step:,.0f}\n{name} {short(value)}", radius=3.5)


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
