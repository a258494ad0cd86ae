"""Plots without a library: axes, curves, points and levels, placed in pixels. `display.svg` draws them as SVG."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

LARGEST = 1e100  # values beyond it, or below its inverse, would overflow in differences and ratios

CHARACTER = 6.8  # the width of a digit on an axis, in pixels; see `svg text` in the style sheet
RIGHT, BOTTOM = 16, 42  # margins, in pixels
HOVERS = 60  # columns of a plot that show their values when the pointer is on them


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
    apart = max((max(sizes) / min(sizes)) ** 0.16, 1.2)
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


def memory_axis(values: Sequence[int], label: str) -> Axis:
    """A logarithmic axis of bytes. It spans at least a factor of three, so that values that are equal look so.

    >>> [name for _, name in memory_axis([3 * 2**20, 180 * 2**20], "memory").ticks]
    ['4 MiB', '8 MiB', '16 MiB', '32 MiB', '64 MiB', '128 MiB']
    """
    low, high = float(max(min(values), 1)), float(max(*values, 1))
    stretch = max((high / low) ** 0.08, math.sqrt(3 * low / high))
    low, high = low / stretch, high * stretch
    # The finest ticks of which there are six at most: quarters of octaves, halves, octaves, or several octaves apart.
    finest = [2.0**power * factor for power in range(51) for factor in (1, 1.25, 1.5, 1.75)]
    for every in (1, 2, 4, 8, 16, 32, 64):
        numbers = [number for number in finest[::every] if low <= number <= high]
        if len(numbers) <= 6:
            break
    return Axis(low, high, label, tuple((number, _bytes(number)) for number in numbers), is_log=True)


def _bytes(number: float) -> str:
    power = min(int(math.log2(number) / 10), 4)
    return f"{number / 1024**power:g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


# Plots.


class Plot:
    """One plot: curves, points and levels over two axes, in pixels.

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
        # What the pointer finds: (left edge, width, place of the value or None, text)
        self.hovers: list[tuple[float, float, tuple[float, float] | None, str]] = []
        self.points: list[tuple[float, float, float, str, str]] = []  # (x, y, radius, style, text for the pointer)

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

    def point(self, x: float, y: float, style: str, text: str, radius: float = 4) -> None:
        """Draws a disc, with a text that is shown when the pointer is on it."""
        self.points.append((self.across(x), self.down(y), radius, style, text))

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
        known = series.is_known
        for place, (start, stop) in zip(places, itertools.pairwise(edges), strict=True):
            texts = [f"step {series.steps[place]:,.0f}", f"{name} {short(series.values[place])}"]
            if smooth is not None and smooth.is_known[place]:
                texts.append(f"smoothed {short(smooth.values[place])}")
            value = (self.across(series.steps[place]), self.down(series.values[place])) if known[place] else None
            self.hovers.append((start, round(max(stop - start, 0.0), 1), value, joined(*texts)))


def joined(*texts: str) -> str:
    """What the pointer reads: the texts that are not empty, side by side."""
    return " \N{MIDDLE DOT} ".join(filter(None, texts))


@dataclasses.dataclass(frozen=True)
class Figure:
    """A plot with its title, legend and caption."""

    name: str
    title: str
    plots: tuple[Plot, ...]  # one for all screens, or one for wide and one for narrow screens
    legend: tuple[tuple[str, str], ...] = ()  # (style, label)
    caption: str = ""
