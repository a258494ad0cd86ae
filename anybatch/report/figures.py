"""The figures of a report: the loss, other columns of the history, the noise scale, and the candidates of a plan.

They are plots in SVG without ids, scripts, fonts or colours. Their elements have classes, and the style sheet of the
page (`page.html.jinja`) gives them the colours of the light or dark scheme. The text is text, so it can be selected and
read aloud.
"""

import dataclasses
import html
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from anybatch.call.memory import readable
from anybatch.planning.plan import Candidate, Plan

MOST_POINTS = 1000
LARGEST = 1e100  # values beyond it, or below its inverse, would overflow in differences and ratios

CHARACTER = 6.8  # the width of a digit on an axis, in pixels; see `svg text` in the style sheet
RIGHT, BOTTOM = 16, 42  # margins, in pixels
TIMES = "\u00d7"


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


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """The series with about `most` points at most: the lowest and the highest of each interval, so that spikes stay.

    The first interval is divided further, into intervals that double in length. A loss falls most steeply there, and
    one straight line over the interval would lie above the values.

    >>> long = Series(np.arange(100_000.0), np.zeros(100_000))
    >>> long.values[777] = 5.0
    >>> len(thinned(long)) <= MOST_POINTS + 2, float(thinned(long).values.max())
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
    mantissa, _, power = scientific(value, 2).partition(TIMES)
    mantissa = mantissa.rstrip("0").rstrip(".")
    return power if mantissa == "1" else f"{mantissa}{TIMES}{power}"


def scientific(value: float, decimals: int) -> str:
    r"""A number with a power of ten, always with the same number of digits, for a column of a table.

    >>> scientific(1e-14, 1) == "1.0\u00d710⁻¹⁴"
    True
    """
    mantissa, _, exponent = f"{value:.{decimals}e}".partition("e")
    return f"{mantissa}{TIMES}10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


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
        values = drawable(values)
        if self.is_log:
            low, high = math.log(self.low), math.log(self.high)
            return (np.log(np.maximum(values, self.low)) - low) / (high - low)
        return (values - self.low) / (self.high - self.low)


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
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        margin = 0.1 * max(abs(low), abs(high)) or 1.0
        low, high = low - margin, high + margin
    else:
        margin = padding * (high - low)
        low, high = low if from_zero and low == 0 else low - margin, high + margin
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
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) + (1 if abs(step / power - 2.5) < 1e-6 else 0)
    decimals = 0 if step >= 10 else decimals
    if decimals > 4 or max(abs(low), abs(high)) >= 1e7:
        return tuple((number, short(number)) for number in numbers)
    return tuple((number, f"{number:,.{decimals}f}") for number in numbers)


def _log_ticks(low: float, high: float) -> tuple[tuple[float, str], ...]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1,) if last - first > 3 else (1, 3) if last - first > 2 else (1, 2, 5)
    stride = max(1, math.ceil((last - first) / 8))
    numbers = [factor * 10.0**power for power in range(first, last + 1, stride) for factor in factors]
    return tuple((number, short(number)) for number in numbers if low <= number <= high)


# Plots.


class Plot:
    """One plot: curves, points and levels over two axes.

    Args:
      x: the horizontal axis.
      y: the vertical axis.
      width: in pixels.
      height: in pixels.
      text: what the plot shows, in words, for screen readers.
    """

    def __init__(self, x: Axis, y: Axis, *, width: int, height: int, text: str) -> None:
        self.x, self.y, self.width, self.height, self.text = x, y, width, height, text
        self.left = 14 + CHARACTER * max((len(name) for _, name in y.ticks), default=1)
        self.top = 28 if y.label else 12
        self._parts: list[str] = []

    def _across(self, values: np.ndarray | float) -> np.ndarray:
        return self.left + self.x.place(np.asarray(values)) * (self.width - self.left - RIGHT)

    def _down(self, values: np.ndarray | float) -> np.ndarray:
        return self.height - BOTTOM - self.y.place(np.asarray(values)) * (self.height - self.top - BOTTOM)

    def curve(self, series: Series, style: str) -> None:
        """Draws a line through the values, interrupted at gaps. A value between two gaps is a dot."""
        path, is_down = [], False
        known = series.is_known
        across, down = self._across(series.steps), self._down(series.values)
        for place in range(len(series)):
            if known[place]:
                # A line of length 0 is drawn as a dot, since lines have round ends.
                alone = not is_down and (place + 1 == len(series) or not known[place + 1])
                path.append(f"{'L' if is_down else 'M'}{across[place]:.1f} {down[place]:.1f}{'h0' if alone else ''}")
            is_down = bool(known[place])
        self._parts.append(f'<path class="curve {style}" d="{"".join(path)}"/>')

    def point(self, x: float, y: float, style: str, title: str, radius: float = 4) -> None:
        """Draws a disc, with a title that is shown when the pointer is on it."""
        place = f'cx="{self._across(x):.1f}" cy="{self._down(y):.1f}" r="{radius}"'
        self._parts.append(f'<circle class="point {style}" {place}><title>{html.escape(title)}</title></circle>')

    def level(self, y: float, label: str, curve: Series) -> None:
        """Draws a horizontal line. Its label goes to the one of its four corners that is farthest from the curve."""
        down, right = float(self._down(y)), self.width - RIGHT
        known = curve.known
        places, heights = self.x.place(known.steps), self._down(known.values)
        corners = []
        for side, is_near in (("start", places < 0.35), ("end", places > 0.65)):
            for below in (-7, 16):
                free = np.abs(heights[is_near] - (down + below - 4)).min(initial=self.height)
                corners.append((self.top + 10 < down + below < self.height - BOTTOM, free, side, below))
        *_, side, below = max(corners)
        across = self.left + 4 if side == "start" else right - 4
        self._parts.append(f'<path class="level" d="M{self.left:.1f} {down:.1f}H{right}"/>')
        place = f'text-anchor="{side}" x="{across:.1f}" y="{down + below:.1f}"'
        self._parts.append(f'<text class="name" {place}>{html.escape(label)}</text>')

    def mark(self, x: float, label: str) -> None:
        """Draws a vertical band behind everything else, with its label at the top."""
        across = float(self._across(x))
        anchor = "start" if across < self.left + 60 else "end" if across > self.width - RIGHT - 60 else "middle"
        band = f'<path class="band" d="M{across:.1f} {self.top}V{self.height - BOTTOM}"/>'
        name = (
            f'<text class="tick" text-anchor="{anchor}" x="{across:.1f}" y="{self.top - 8}">{html.escape(label)}</text>'
        )
        self._parts[:0] = [band, name]

    def hover(self, steps: np.ndarray, titles: Sequence[str]) -> None:
        """Adds an invisible column around each step, whose title is shown when the pointer is on it."""
        across = self._across(steps)
        edges = [self.left, *((across[:-1] + across[1:]) / 2), self.width - RIGHT]
        height = self.height - self.top - BOTTOM
        for start, stop, title in zip(edges[:-1], edges[1:], titles, strict=True):
            place = f'x="{start:.1f}" y="{self.top}" width="{max(stop - start, 0):.1f}" height="{height}"'
            self._parts.append(f'<rect class="hover" {place}><title>{html.escape(title)}</title></rect>')

    def svg(self, style: str = "") -> str:
        """The plot as an SVG element."""
        right, floor = self.width - RIGHT, self.height - BOTTOM
        frame = []
        for value, name in self.y.ticks:
            down = float(self._down(value))
            frame.append(f'<path class="grid" d="M{self.left:.1f} {down:.1f}H{right}"/>')
            frame.append(
                f'<text class="tick" text-anchor="end" x="{self.left - 7:.1f}" y="{down + 4:.1f}">{name}</text>'
            )
        for value, name in self.x.ticks:
            across = float(self._across(value))
            frame.append(f'<path class="notch" d="M{across:.1f} {floor}v5"/>')
            frame.append(f'<text class="tick" text-anchor="middle" x="{across:.1f}" y="{floor + 18}">{name}</text>')
        frame.append(f'<path class="base" d="M{self.left:.1f} {floor}H{right}"/>')
        frame.append(f'<text class="tick" x="0" y="{self.top - 12}">{html.escape(self.y.label)}</text>')
        frame.append(
            f'<text class="tick" text-anchor="end" x="{right}" y="{floor + 36}">{html.escape(self.x.label)}</text>'
        )
        head = f'<svg class="plot {style}" viewBox="0 0 {self.width} {self.height}" role="img"'
        return visible(f'{head} aria-label="{html.escape(self.text)}">{"".join(frame)}{"".join(self._parts)}</svg>')


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
