"""Plots as SVG: axes, curves, points, levels, and the numbers written on them.

The SVG has no ids, scripts, fonts or colours. Its elements have classes, and the style sheet of the page
(`page.html.jinja`) gives them the colours of the light or dark scheme. The text is text, so it can be selected and read
aloud.
"""

import dataclasses
import html
import itertools
import math
from collections.abc import Sequence

import numpy as np

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
