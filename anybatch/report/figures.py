"""Columns of a history as curves: what is missing is a gap, what is too long is thinned, what is noisy is smoothed.

Plots as SVG, drawn by hand: text is text, colours are those of the page, and nothing in them has an id.

The plots of a report: the loss, other columns of a history, the noise scale, and what a plan chose among.
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
LARGEST = 1e100  # beyond it, and below its inverse, differences and ratios overflow; nobody could read them either


@dataclasses.dataclass(frozen=True, eq=False)
class Series:
    """A curve: for each step a value, NaN where there is a gap."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def is_known(self) -> np.ndarray:
        """Where there is no gap."""
        return np.isfinite(self.values)

    @property
    def known(self) -> "Series":
        """The same without its gaps."""
        return Series(self.steps[self.is_known], self.values[self.is_known])

    def __len__(self) -> int:
        return len(self.steps)


def number(value: Any) -> float:
    """A cell of a history as a float; NaN if it is no number.

    >>> number("1.5"), number(None)
    (1.5, nan)
    """
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def column(history: Sequence[Mapping[str, Any]], name: str) -> Series:
    """The column of that name, in the order of the steps.

    A row without the column is left out: it was not asked for there. One whose value is None, NaN or infinite is a gap.

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


def drawable(values: np.ndarray) -> np.ndarray:
    """The values that can be added and divided: what is too large is cut, what is too small is 0.

    >>> drawable(np.array([1e300, 2.0, 1e-300])).tolist()
    [1e+100, 2.0, 0.0]
    """
    return np.where(np.abs(values) < 1 / LARGEST, 0.0, np.clip(values, -LARGEST, LARGEST))


def is_rate(name: str) -> bool:
    """Whether a column is a speed. Nobody knows that of the first step, which is no failure."""
    return name.endswith("_per_second")


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """At most about as many points: of each stretch the lowest and the highest, so that no spike is lost.

    The first stretch is divided further, each part twice as long as the one before: a loss falls most steeply there,
    and a straight line over all of it would lie above the values.

    >>> long = Series(np.arange(100_000.0), np.zeros(100_000))
    >>> long.values[777] = 5.0
    >>> len(thinned(long)) <= MOST_POINTS + 2, float(thinned(long).values.max())
    (True, 5.0)
    """
    if len(series) <= most:
        return series
    kept = {0, len(series) - 1}
    known = series.is_known
    parts = 2 ** np.arange(int(math.log2(2 * len(series) / most)))
    edges = np.union1d(np.linspace(0, len(series), most // 2 + 1 - len(parts)).astype(int), parts)
    for start, stop in itertools.pairwise(edges):
        places = start + np.flatnonzero(known[start:stop])
        if len(places):
            stretch = series.values[places]
            kept |= {int(places[np.argmin(stretch)]), int(places[np.argmax(stretch)])}
        else:
            kept.add(int(start))  # a gap that is seen
    places = np.array(sorted(kept))
    return Series(series.steps[places], series.values[places])


def smoothed(series: Series, share: float = 0.02) -> Series:
    """Moving averages of moving averages, almost a bell: without a lag, and gaps stay gaps.

    It begins at the first value. From there windows grow in proportion to the place, and are symmetric: a longer arm to
    the right would let the curve begin too low, and one that reaches back to the first values, where a loss falls most
    steeply, would hold it above all others for long.

    Args:
      series: the curve.
      share: of its length, on each side of a point.
    """
    length = len(series)
    places = np.arange(length)
    radius = np.minimum(places // 4, max(1, round(share * length)))
    first, last = places - radius, np.minimum(places + radius, length - 1)
    values, known = drawable(series.values), series.is_known
    for _ in range(3):
        totals = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
        counts = np.concatenate([[0], np.cumsum(known)])
        # Where nothing is known the count is 0; that place is a gap anyway.
        values = (totals[last + 1] - totals[first]) / np.maximum(counts[last + 1] - counts[first], 1)
    return Series(series.steps, np.where(known, values, np.nan))


CHARACTER = 6.8  # the width of a digit of an axis, in pixels; see `svg text` of the page
RIGHT, BOTTOM = 16, 42
TIMES = "\u00d7"


@dataclasses.dataclass(frozen=True)
class Axis:
    """A range of numbers, and those of them that are named."""

    low: float
    high: float
    label: str
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    def place(self, values: np.ndarray) -> np.ndarray:
        """Where values are between both ends, from 0 to 1."""
        values = drawable(values)
        if self.is_log:
            low, high = math.log(self.low), math.log(self.high)
            return (np.log(np.maximum(values, self.low)) - low) / (high - low)
        return (values - self.low) / (self.high - self.low)


def axis_of(
    values: np.ndarray, label: str, *, from_zero: bool = False, padding: float = 0.05, log_from: float = math.inf
) -> Axis:
    """The axis that shows all values; a logarithmic one, if they are positive and that many times apart."""
    values = drawable(values)
    low, high = float(np.min(values)), float(np.max(values))
    if low > 0 and high / low >= log_from:
        stretch = (high / low) ** padding
        low, high = low / stretch, high * stretch
        return Axis(low, high, label, _log_ticks(low, high), is_log=True)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    # A flat line still needs an axis with digits that can be told apart.
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        margin = 0.1 * max(abs(low), abs(high)) or 1.0
        low, high = low - margin, high + margin
    else:
        margin = padding * (high - low)
        low, high = low if from_zero and low == 0 else low - margin, high + margin
    return Axis(low, high, label, _linear_ticks(low, high))


def size_axis(sizes: Sequence[int], chosen: int | None, label: str) -> Axis:
    """A logarithmic axis on which the sizes themselves are named, but for those too near to each other to write."""
    ticks = [] if chosen is None else [chosen]
    ends = {min(sizes), max(sizes)}
    apart = max((max(sizes) / min(sizes)) ** 0.12, 1.2)
    for size in sorted(set(sizes), key=lambda size: (size not in ends, size & (size - 1) != 0, size)):
        if all(max(size / tick, tick / size) > apart for tick in ticks):
            ticks.append(size)
    stretch = max(max(sizes) / min(sizes), 2.0) ** 0.06
    named = tuple((float(tick), f"{tick:,}") for tick in sorted(ticks))
    return Axis(min(sizes) / stretch, max(sizes) * stretch, label, named, is_log=True)


def short(value: float) -> str:
    """A number for people, to four digits.

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
    r"""With a power of ten, and as many digits for every value: for a column of a table.

    >>> scientific(1e-14, 1) == "1.0\u00d710⁻¹⁴"
    True
    """
    mantissa, _, exponent = f"{value:.{decimals}e}".partition("e")
    return f"{mantissa}{TIMES}10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


# What has no shape of its own is shown as its code: a model that knows nothing yet writes such things. So is what turns
# the direction of writing: after it, a line reads as another one than it is.
_CODES = {code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}
_CODES |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def visible(text: str) -> str:
    r"""A text in which every character is seen.

    >>> print(visible("a\x00b\u202ec"))
    a\x00b\u202ec
    """
    return text.replace("\r\n", "\n").translate(_CODES)


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


class Plot:
    """One drawing: curves, points and levels over two axes."""

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
        """A line through the values, with its gaps. A value between two gaps is a dot, by the round end of a line."""
        path, is_down = [], False
        known = series.is_known
        across, down = self._across(series.steps), self._down(series.values)
        for place in range(len(series)):
            if known[place]:
                alone = not is_down and (place + 1 == len(series) or not known[place + 1])
                path.append(f"{'L' if is_down else 'M'}{across[place]:.1f} {down[place]:.1f}{'h0' if alone else ''}")
            is_down = bool(known[place])
        self._parts.append(f'<path class="curve {style}" d="{"".join(path)}"/>')

    def point(self, x: float, y: float, style: str, title: str, radius: float = 4) -> None:
        """A disc that says what it is, if the pointer rests on it."""
        place = f'cx="{self._across(x):.1f}" cy="{self._down(y):.1f}" r="{radius}"'
        self._parts.append(f'<circle class="point {style}" {place}><title>{html.escape(title)}</title></circle>')

    def level(self, y: float, label: str, curve: Series) -> None:
        """A horizontal line, and its name in that of its four corners which is furthest from the curve."""
        down, right = float(self._down(y)), self.width - RIGHT
        known = curve.known
        places, heights = self.x.place(known.steps), self._down(known.values)
        room = []
        for side, is_near in (("start", places < 0.35), ("end", places > 0.65)):
            for below in (-7, 16):
                free = np.abs(heights[is_near] - (down + below - 4)).min(initial=self.height)
                room.append((self.top + 10 < down + below < self.height - BOTTOM, free, side, below))
        *_, side, below = max(room)
        across = self.left + 4 if side == "start" else right - 4
        self._parts.append(f'<path class="level" d="M{self.left:.1f} {down:.1f}H{right}"/>')
        place = f'text-anchor="{side}" x="{across:.1f}" y="{down + below:.1f}"'
        self._parts.append(f'<text class="name" {place}>{html.escape(label)}</text>')

    def mark(self, x: float, label: str) -> None:
        """A vertical band behind everything else, with its name at the top."""
        across = float(self._across(x))
        anchor = "start" if across < self.left + 60 else "end" if across > self.width - RIGHT - 60 else "middle"
        band = f'<path class="band" d="M{across:.1f} {self.top}V{self.height - BOTTOM}"/>'
        name = (
            f'<text class="tick" text-anchor="{anchor}" x="{across:.1f}" y="{self.top - 8}">{html.escape(label)}</text>'
        )
        self._parts[:0] = [band, name]

    def hover(self, steps: np.ndarray, titles: Sequence[str]) -> None:
        """Columns, one for each of some steps, that say what the curves are there if the pointer rests on them."""
        across = self._across(steps)
        edges = [self.left, *((across[:-1] + across[1:]) / 2), self.width - RIGHT]
        height = self.height - self.top - BOTTOM
        for start, stop, title in zip(edges[:-1], edges[1:], titles, strict=True):
            place = f'x="{start:.1f}" y="{self.top}" width="{max(stop - start, 0):.1f}" height="{height}"'
            self._parts.append(f'<rect class="hover" {place}><title>{html.escape(title)}</title></rect>')

    def svg(self, style: str = "") -> str:
        """The drawing as an element of a page."""
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
    styles = list(dict.fromkeys(each.variant for each in candidates))
    for style, dash in zip(styles, itertools.cycle(_DASHES), strict=False):
        mine = sorted((each for each in candidates if each.variant == style), key=lambda each: each.microbatch_size)
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
