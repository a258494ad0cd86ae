"""Plots as SVG, drawn by hand: text is text, colours are those of the page, and nothing in them has an id."""

import dataclasses
import html
import math
from collections.abc import Sequence

import numpy as np

from anybatch.report.series import Series, drawable

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
