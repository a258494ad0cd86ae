"""Draws the evidence of a check as HTML and SVG: arrays, memory against batch size, and collectives.

Every function takes plain data from `anybatch.learn.check` and returns one element, which is also valid XML. Colours
come from the CSS variables of the page, and `CSS` has the rest of the style. Whatever a picture says with a colour, it
also says with a sign or in words.
"""

import dataclasses
import html
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from anybatch.learn.check import CollectivesShown, MemoryShown, ShownArray

if TYPE_CHECKING:
    from anybatch.call.plots import Plot

CSS = """
.ab-pic { color: var(--ab-text); font-size: 0.875rem; line-height: 1.45; }
.ab-pic p { margin: 0; }
.ab-pic-svg { display: block; width: 100%; height: auto; }
.ab-pic-svg text { fill: var(--ab-muted); font-family: inherit; font-size: 12px; font-variant-numeric: tabular-nums; }
.ab-pic-words { color: var(--ab-muted); text-wrap: pretty; }
.ab-pic-allowed { color: var(--ab-muted); white-space: nowrap; }
.ab-pic-good { color: var(--ab-good); font-weight: 600; }
.ab-pic-bad { color: var(--ab-bad); font-weight: 600; }
.ab-pic-leaf + .ab-pic-leaf { margin-top: 1.25rem; }
.ab-pic-head { display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 0.75rem; margin-bottom: 0.375rem; }
.ab-pic-path { font-family: var(--ab-mono); font-weight: 600; overflow-wrap: anywhere; }
.ab-pic-pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr));
  gap: 0.5rem 1rem; align-items: start; margin-bottom: 0.25rem; }
.ab-pic-side { min-width: 0; }
.ab-pic-name { font-size: 0.8125rem; font-weight: 600; margin-bottom: 0.125rem; }
.ab-pic-yours { color: var(--ab-yours); }
.ab-pic-expected { color: var(--ab-reference); }
.ab-pic-scroll { box-sizing: border-box; overflow: auto; max-width: 100%; max-height: 18rem;
  scrollbar-width: thin; scrollbar-color: var(--ab-muted) transparent; }
.ab-pic-side .ab-pic-scroll { width: fit-content; padding: 0.25rem; border: 1px solid var(--ab-border);
  border-radius: 6px; }
.ab-pic-array { border-collapse: collapse; font-family: var(--ab-mono); font-size: 0.8125rem; line-height: 1.6;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.ab-pic-array th, .ab-pic-array td { padding: 0 0.25rem 0 1.3em; border: 0; text-align: right; }
.ab-pic-array [scope="row"], .ab-pic-array td:empty { padding-left: 0.25rem; }
.ab-pic-array th { color: var(--ab-muted); font-weight: 400; font-size: 0.75rem; }
.ab-pic-array .ab-pic-slice { text-align: left; padding: 0.25rem 0 0 0.25rem; }
.ab-pic-array .ab-pic-off { color: var(--ab-bad); font-weight: 700; }
.ab-pic-array .ab-pic-should { color: var(--ab-good); font-weight: 700; }
.ab-pic-sign { display: inline-block; width: 1em; margin-left: -1.1em; padding-right: 0.1em; }
.ab-pic-map { margin-top: 0.75rem; }
.ab-pic-map .ab-pic-scroll { max-height: 22rem; }
.ab-pic-legend { display: flex; flex-wrap: wrap; align-items: center; gap: 0.125rem 1rem; margin-top: 0.375rem;
  color: var(--ab-muted); font-size: 0.8125rem; }
.ab-pic-key { display: inline-flex; align-items: center; gap: 0.375rem; }
.ab-pic-key > svg { flex: none; display: block; }
.ab-pic-number { font-family: var(--ab-mono); font-variant-numeric: tabular-nums; }
.ab-pic-counts { display: flex; flex-wrap: wrap; gap: 0 1.25rem; margin-bottom: 0.5rem; }
.ab-pic-flow + .ab-pic-flow { margin-top: 1rem; }
"""

COLUMNS = 8  # the most numbers in a row of an array with one axis
CHARACTERS = 36  # about the most characters in such a row
MAPPED = 6  # an array with more numbers than this has a map of its differences
CHARACTER = 6.8  # the width of a digit in an image
TIMES, MINUS = "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}"


def _escape(text: object) -> str:
    return html.escape(str(text))


def _words(text: str) -> str:
    return f'<p class="ab-pic-words">{_escape(text)}</p>'


def _svg(size: tuple[float, float], title: str, description: str, parts: Sequence[str], stretch: float = 1.0) -> str:
    """An image that shrinks with the page, and grows by a factor of `stretch` at most."""
    width, height = size
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ab-pic-svg" role="img" viewBox="0 0 {width:g} {height:g}" '
        f'style="max-width: {stretch * width:g}px"><title>{_escape(title)}</title><desc>{_escape(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, words: object, anchor: str = "start", color: str = "") -> str:
    style = f' style="fill: {color}; font-weight: 600"' if color else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{style}>{_escape(words)}</text>'


# Arrays.


def arrays(shown: Sequence[ShownArray]) -> str:
    """Each array of an answer beside the expected one, with its wrong numbers marked.

    If some numbers of an array with more than `MAPPED` numbers are wrong, a map of the differences follows.
    """
    leaves = "".join(_leaf(each) for each in shown)
    return f'<div class="ab-pic">{leaves or _words("The answer has no arrays.")}</div>'


def _leaf(shown: ShownArray) -> str:
    path = shown.path or ("the array" if shown.shape else "the number")
    head = f'<span class="ab-pic-path">{_escape(path)}</span>'
    if shown.shape:
        head += f'<span class="ab-pic-words">shape {shown.shape}</span>'
    off, count = shown.is_off, len(shown.yours)
    if not count:
        return f'<section class="ab-pic-leaf"><div class="ab-pic-head">{head}{_words("No numbers.")}</div></section>'
    pair = _side(shown, "yours", off) + _side(shown, "expected", off)
    note = _words(f"Shown: the first {count:,} of {count + shown.left_out:,} numbers.") if shown.left_out else ""
    differences = _map(shown, off) if any(off) and count > MAPPED else ""
    return (
        f'<section class="ab-pic-leaf"><div class="ab-pic-head">{head}{_judged(shown, off)}</div>'
        f'<div class="ab-pic-pair">{pair}</div>{note}{differences}</section>'
    )


def _judged(shown: ShownArray, off: Sequence[bool]) -> str:
    """How many numbers are off, and how far they may be off."""
    these = f"{'the first ' if shown.left_out else ''}{len(off):,} numbers"
    allowed = f' <span class="ab-pic-allowed">(allowed: {shown.tolerance:.1g})</span>' if shown.tolerance else ""
    if any(off):
        words = "off" if len(off) == 1 else f"{sum(off):,} of {these} {'is' if sum(off) == 1 else 'are'} off"
        return f'<span><span class="ab-pic-bad">≠ {words}</span>{allowed}</span>'
    words = "right" if len(off) == 1 else f"none of {these} is off" if shown.left_out else f"all {these} are right"
    return f'<span><span class="ab-pic-good">✓ {words}</span>{allowed}</span>'


def _writer(shown: ShownArray) -> Callable[[float], str]:
    """A function that writes the numbers of an array with the same decimals, and six digits at most.

    The largest expected number decides the decimals. Integers have all of their digits.
    """
    finite = [each for each in (*shown.expected, *shown.yours) if math.isfinite(each)]
    scale = max((abs(each) for each in shown.expected if math.isfinite(each)), default=0.0)
    scale = scale or max((abs(each) for each in finite), default=0.0)
    if all(each.is_integer() and abs(each) < 2**53 for each in finite):
        form, most, limit = "f", 0, math.inf
    elif 1e-3 <= scale < 1e6:
        form, most, limit = "f", 5 - math.floor(math.log10(scale)), 10 * max(scale, 1e5)
    else:
        form, most, limit = "e", 5, math.inf
    usual = [each for each in finite if abs(each) < limit]
    decimals = next(
        few
        for few in range(most + 1)
        if all(float(f"{each:.{few}{form}}") == float(f"{each:.{most}{form}}") for each in usual)
    )

    def write(number: float) -> str:
        if not math.isfinite(number):
            return _not_finite(number)
        text = f"{number:.{decimals}{form}}" if abs(number) < limit else f"{number:.5e}"
        return text.removeprefix("-") if float(text) == 0 else text

    return write


def _not_finite(number: float) -> str:
    return "NaN" if math.isnan(number) else "inf" if number > 0 else "-inf"


def _difference(number: float) -> str:
    """A difference with its sign, and three digits at most."""
    return f"{number:+.3g}" if math.isfinite(number) else _not_finite(number)


def _index(shape: Sequence[int], place: int) -> str:
    """The index of a place in a flat array.

    >>> _index((2, 3), 5)
    '1, 2'
    """
    index = []
    for size in reversed(shape):
        place, last = divmod(place, size)
        index.append(str(last))
    return ", ".join(reversed(index))


Rows = list[tuple[str, range]]  # the label of each row, and the places of its numbers in the flat array


def _wrapped(count: int, columns: int) -> Rows:
    """The places of an array with one axis, in rows of about equal length. The label is the index of the first."""
    columns = math.ceil(count / math.ceil(count / columns))
    return [(str(start), range(start, min(start + columns, count))) for start in range(0, count, columns)]


def _matrices(shape: tuple[int, ...], count: int) -> Iterator[tuple[str, Rows]]:
    """The matrices of an array with two axes or more, each with its index: "[0, :, :]", or "" if there is only one."""
    *leading, rows, columns = shape
    for start in range(0, count, rows * columns):
        starts = range(start, min(start + rows * columns, count), columns)
        label = f"[{_index(leading, start // (rows * columns))}, :, :]" if leading else ""
        yield label, [(str(row), range(at, min(at + columns, count))) for row, at in enumerate(starts)]


def _side(shown: ShownArray, name: str, off: Sequence[bool]) -> str:
    """One of the two arrays with its indices, in a box that scrolls."""
    write, numbers = _writer(shown), shown.yours if name == "yours" else shown.expected
    if len(shown.shape) > 1:
        parts = list(_matrices(shown.shape, len(numbers)))
        columns, plus = shown.shape[-1], ""
    else:
        width = 2.5 + max(len(write(each)) for each in (*shown.yours, *shown.expected))
        parts = [("", _wrapped(len(numbers), max(2, min(COLUMNS, round(CHARACTERS / width)))))]
        columns, plus = len(parts[0][1][0][1]), "+"
    # A single row of an array with one axis needs no label, and a number needs none at all.
    has_labels = len(shown.shape) > 1 or len(parts[0][1]) > 1
    rows = []
    if shown.shape:
        names = "".join(f'<th scope="col">{plus if has_labels else ""}{place}</th>' for place in range(columns))
        rows.append(f"<tr>{'<td></td>' if has_labels else ''}{names}</tr>")
    for matrix, found in parts:
        if matrix:
            rows.append(f'<tr><th class="ab-pic-slice" colspan="{columns + 1}">{matrix}</th></tr>')
        for label, places in found:
            cells = "".join(_cell(shown, name, place, write(numbers[place]), off[place]) for place in places)
            first = f'<th scope="row">{label}</th>' if has_labels else ""
            is_cut = len(shown.shape) > 1 and len(places) < columns
            rows.append(f"<tr>{first}{cells}{'<td>…</td>' if is_cut else ''}</tr>")
    return (
        f'<div class="ab-pic-side"><div class="ab-pic-name ab-pic-{name}">{name}</div>'
        f'<div class="ab-pic-scroll" tabindex="0" role="group" aria-label="{_escape(f"{name} {shown.path}".strip())}">'
        f'<table class="ab-pic-array"><tbody>{"".join(rows)}</tbody></table></div></div>'
    )


def _cell(shown: ShownArray, name: str, place: int, text: str, is_off: bool) -> str:
    if not is_off:
        return f"<td>{text}</td>"
    if name == "expected":
        return f'<td class="ab-pic-should">{text}</td>'
    off = _difference(shown.yours[place] - shown.expected[place])
    return f'<td class="ab-pic-off" title="off by {off}"><span class="ab-pic-sign">≠</span>{text}</td>'


# The map of the differences.


def _map(shown: ShownArray, off: Sequence[bool]) -> str:
    """A square for each number: blue if yours is smaller, red if it is larger, grey if it is right."""
    differences = [mine - theirs for mine, theirs in zip(shown.yours, shown.expected, strict=True)]
    wrong = [each for each, is_off in zip(differences, off, strict=True) if is_off]
    largest = max((abs(each) for each in wrong if math.isfinite(each)), default=0.0)
    rows = _map_rows(shown.shape, len(off))
    columns = max(len(places) for _, places in rows)
    side = next((side for most, side in ((10, 22), (16, 18), (32, 9)) if max(columns, len(rows) / 2) <= most), 5)
    is_wrapped = len(rows) > 1 if len(shown.shape) < 2 else columns < shown.shape[-1]
    left, top = 8 + CHARACTER * max(len(label) for label, _ in rows), 18
    parts = [
        _text(left + (column + 0.5) * side, top - 6, f"{'+' if is_wrapped else ''}{column}", "middle")
        for column in range(0, columns, math.ceil(22 / side))
    ]
    for row, (label, places) in enumerate(rows):
        if row % math.ceil(14 / side) == 0:
            parts.append(_text(left - 6, top + (row + 0.5) * side + 4, label, "end"))
        parts += (
            _square(left + column * side, top + row * side, side, differences[place], largest, off[place])
            for column, place in enumerate(places)
        )
    size = (left + columns * side, top + len(rows) * side)
    image = _svg(size, "Yours minus expected, number by number", _in_words(shown, differences, off), parts)
    return (
        '<div class="ab-pic-map"><div class="ab-pic-scroll" tabindex="0" role="group" aria-label="Differences">'
        f"{image}</div>{_legend(shown.tolerance, wrong, largest, all(off))}</div>"
    )


def _map_rows(shape: tuple[int, ...], count: int) -> Rows:
    """The rows of a map. Those of an array with two axes or more are its rows, which are wrapped if they are long."""
    if len(shape) < 2:
        return _wrapped(count, 8 if count <= 32 else 16 if count <= 256 else 32)
    most, rows = 64, []
    for start in range(0, count, shape[-1]):
        end = min(start + shape[-1], count)
        for at in range(start, end, most):
            label = _index(shape[:-1], start // shape[-1]) if at == start else ""
            rows.append((label, range(at, min(at + most, end))))
    return rows


def _square(x: float, y: float, side: float, difference: float, largest: float, is_off: bool) -> str:
    gap = 1 if side > 6 else 0.5
    size = side - gap
    frame = f'<rect x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}"'
    if not is_off:
        return f'{frame} fill="var(--ab-muted)" fill-opacity="0.18"/>'
    if not math.isfinite(difference):
        half = size / 2
        strokes = f"M{x:g} {y + half:g}l{half:g} {-half:g}M{x:g} {y + size:g}l{size:g} {-size:g}"
        strokes += f"M{x + half:g} {y + size:g}l{half:g} {-half:g}"
        return (
            f'{frame} fill="none" stroke="var(--ab-text)" stroke-width="0.75"/>'
            f'<path d="{strokes}" fill="none" stroke="var(--ab-text)" stroke-width="1"/>'
        )
    color, opacity = "var(--ab-yours)" if difference < 0 else "var(--ab-bad)", 0.25 + 0.75 * abs(difference) / largest
    made = f'{frame} fill="{color}" fill-opacity="{opacity:.2f}"/>'
    if side >= 9:  # a minus or a plus, for those who cannot tell the colours apart
        reach, middle, center = size / 5, x + size / 2, y + size / 2
        sign = f"M{middle - reach:g} {center:g}h{2 * reach:g}"
        sign += f"M{middle:g} {center - reach:g}v{2 * reach:g}" if difference > 0 else ""
        ink = "var(--ab-surface)" if opacity > 0.6 else "var(--ab-text)"
        made += f'<path d="{sign}" fill="none" stroke="{ink}" stroke-width="1.25"/>'
    return made


def _legend(tolerance: float, wrong: Sequence[float], largest: float, is_all: bool) -> str:
    def key(width: int, squares: str, before: str, after: str) -> str:
        number = f'<span class="ab-pic-number">{before}</span>' if before else ""
        image = f'<svg aria-hidden="true" width="{width}" height="14" viewBox="0 0 {width} 14">{squares}</svg>'
        return f'<span class="ab-pic-key">{number}{image}<span>{after}</span></span>'

    keys = []
    if any(math.isfinite(each) for each in wrong):
        shares = (-1, -0.5, -0.1, 0, 0.1, 0.5, 1)
        squares = "".join(_square(14 * at, 0, 14, share, 1.0, bool(share)) for at, share in enumerate(shares))
        number = f'<span class="ab-pic-number">{_difference(largest)}</span>'
        keys.append(key(98, squares, _difference(-largest), number))
        keys.append(f"<span>{MINUS} blue: yours is smaller</span><span>+ red: yours is larger</span>")
    if not is_all:
        within = f"off by {tolerance:.1g} at most" if tolerance else "equal"
        keys.append(key(14, _square(0, 0, 14, 0.0, 1.0, False), "", within))
    if any(not math.isfinite(each) for each in wrong):
        keys.append(key(14, _square(0.5, 0.5, 14, math.nan, 1.0, True), "", "NaN or infinite"))
    return f'<div class="ab-pic-legend">{"".join(keys)}</div>'


def _in_words(shown: ShownArray, differences: Sequence[float], off: Sequence[bool]) -> str:
    """The differences in words: how many there are, which are the largest, and how many numbers are not finite."""
    wrong = [(abs(each), place) for place, each in enumerate(differences) if off[place] and math.isfinite(each)]
    lost = sum(off) - len(wrong)
    text = f"{sum(off):,} of {len(off):,} numbers {'is' if sum(off) == 1 else 'are'} off."
    if wrong:
        first = sorted(wrong, key=lambda each: -each[0])[:3]
        named = (f"{_difference(differences[place])} at [{_index(shown.shape, place)}]" for _, place in first)
        text += f" The largest differences: {', '.join(named)}."
    return text + (f" {lost:,} {'is' if lost == 1 else 'are'} NaN or infinite." if lost else "")


# Memory.


class _Line(NamedTuple):
    """A line of the picture: a field of `MemoryShown`, its name at the end and in a sentence, and its look."""

    field: str
    name: str
    words: str
    color: str
    dashes: str


_LINES = (
    _Line("yours", "yours", "yours", "var(--ab-yours)", "none"),
    _Line("reference", "solution", "the solution", "var(--ab-reference)", "7 5"),
    _Line("full_batch", "full batch", "the full batch at once", "var(--ab-full)", "1.5 5"),
)


def memory(shown: MemoryShown) -> str:
    """Memory against batch size: a line for yours, one for the solution, and one for the full batch at once."""
    # These import JAX. Evidence comes from a check, which has imported it.
    from anybatch.call.memory import readable
    from anybatch.call.plots import Axis, Plot, Series, axis_of

    known = [(line, getattr(shown, line.field)) for line in _LINES if getattr(shown, line.field)]
    if not known:
        return f'<div class="ab-pic">{_words("No memory was measured.")}</div>'
    highest = max(1, *(each for _, sizes in known for each in sizes))
    unit = readable(highest).split()[1]
    factor = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    # The lines take the left half of the picture, and their names the right half.
    width = (shown.times[-1] - shown.times[0] or 1) / 0.42
    low = shown.times[0] - 0.06 * width
    x = Axis(low, low + width, "batch size", tuple((float(each), f"{each}{TIMES}") for each in shown.times))
    y = axis_of(np.array([0.0, highest / factor]), unit, from_zero=True, padding=0.08)
    text = _memory_in_words(shown, readable)
    plot = Plot(x, y, (360, 220), text)
    end = plot.across(low + 0.53 * width)
    parts, names = _axes(plot, end), []
    for line, sizes in known:
        plot.curve(Series(np.array(shown.times, float), np.array(sizes, float) / factor), line.field)
        parts.append(
            f'<path d="{plot.curves[-1][1]}" fill="none" stroke="{line.color}" stroke-width="2.5" '
            f'stroke-dasharray="{line.dashes}"/>'
        )
        for times, size in zip(shown.times, sizes, strict=True):
            parts.append(_marker(line, plot.across(times), plot.down(size / factor)))
        names.append((plot.down(sizes[-1] / factor), f"{line.name} {readable(sizes[-1])}", line.color))
    parts += (_text(end + 6, down + 4, words, color=color) for down, words, color in _apart(names, plot.bottom))
    image = _svg((plot.width, plot.height), "Memory against batch size", text, parts, stretch=1.2)
    return f'<div class="ab-pic">{image}{_words(text)}</div>'


def _axes(plot: "Plot", end: float) -> list[str]:
    """The ticks of both axes, their labels, and horizontal lines that end at `end`."""
    parts = [_text(plot.left - 6, 14, plot.y.label, "end")]
    for down, name in plot.y_ticks:
        parts.append(_text(plot.left - 6, down + 4, name, "end"))
        parts.append(f'<path d="M{plot.left:g} {down:g}H{end:g}" stroke="var(--ab-border)" stroke-width="1"/>')
    parts += (_text(across, plot.bottom + 21, name, "middle") for across, name in plot.x_ticks)
    middle = (plot.x_ticks[0][0] + plot.x_ticks[-1][0]) / 2
    return [*parts, _text(middle, plot.bottom + 38, plot.x.label, "middle")]


def _marker(line: _Line, x: float, y: float) -> str:
    """A disc for yours, a square around it for the solution, and a diamond for the full batch."""
    if line.field == "yours":
        return f'<circle cx="{x:g}" cy="{y:g}" r="4" fill="{line.color}"/>'
    path = f"M{x - 6:g} {y - 6:g}h12v12h-12z" if line.field == "reference" else f"M{x:g} {y - 7:g}l7 7l-7 7l-7 -7z"
    return f'<path d="{path}" fill="none" stroke="{line.color}" stroke-width="2"/>'


def _apart(names: Sequence[tuple[float, str, str]], bottom: float, gap: float = 16) -> list[tuple[float, str, str]]:
    """The names at the ends of the lines, moved up so that they do not overlap."""
    moved: list[tuple[float, str, str]] = []
    for down, words, color in sorted(names, reverse=True):  # from the bottom up
        moved.append((min(down, moved[-1][0] - gap if moved else bottom - 2), words, color))
    return moved


def _memory_in_words(shown: MemoryShown, readable: Callable[[int], str]) -> str:
    said = []
    for line in _LINES:
        if sizes := getattr(shown, line.field):
            first, last = readable(sizes[0]), readable(sizes[-1])
            verb = "stays at" if first == last else "grows from" if sizes[-1] > sizes[0] else "falls from"
            said.append(f"{line.words} {verb} {first}" + ("" if first == last else f" to {last}"))
    text = "; ".join(said)
    return f"{text[0].upper()}{text[1:]}, for a batch {shown.times[-1]} times as large."


# Collectives.


@dataclasses.dataclass(frozen=True)
class _Flow:
    """How a collective moves numbers.

    Args:
      words: what it does.
      parts: what every device has before and after: "numbers", "all parts" of them, or "one part".
      through: what the numbers of all devices go through; "" if devices send to each other.
      to: if they do, to whom: to "all", to the "next", or only the first one, to the "others".
    """

    words: str
    parts: tuple[str, str] = ("numbers", "numbers")
    through: str = ""
    to: str = "all"


_PARTS = ("all parts", "all parts")
_FLOWS = {
    "all-reduce": _Flow("every device sends its numbers to a sum, and gets the sum", through="sum"),
    "all-gather": _Flow(
        "every device sends its part, and gets the parts of all", ("one part", "all parts"), "all parts"
    ),
    "reduce-scatter": _Flow(
        "every device sends its numbers to a sum, and gets one part of it", ("all parts", "one part"), "sum"
    ),
    "all-to-all": _Flow("every device sends a different part to every device", _PARTS),
    "ragged-all-to-all": _Flow("every device sends a different part, of any size, to every device", _PARTS),
    "collective-permute": _Flow("devices send their numbers to one other device each, such as the next", to="next"),
    "collective-broadcast": _Flow("one device sends its numbers to the others", to="others"),
}
_OTHER = _Flow("the devices exchange numbers")

_WIDTH, _BOX, _STEP, _LEFT = 340.0, (30.0, 22.0), 37.0, 48.0
_ABOVE, _BETWEEN, _BELOW = 18.0, 66.0, 112.0  # the upper edges of the devices before, the sum, and the devices after


def collectives(shown: CollectivesShown) -> str:
    """The devices before and after each kind of collective that was executed, and the number that was wanted."""
    from anybatch.call.memory import readable

    counts: dict[str, int] = {}
    for kind, times, _ in shown.yours:
        counts[kind] = -1 if times < 0 or counts.get(kind, 0) < 0 else counts.get(kind, 0) + times
    devices = "1 device" if shown.devices == 1 else f"{shown.devices} devices"
    is_wanted = counts == dict(shown.wanted)
    executed, wanted = (_counted(each) for each in (counts.items(), shown.wanted))
    mark = '<span class="ab-pic-good">✓ the same</span>' if is_wanted else '<span class="ab-pic-bad">≠ different</span>'
    head = (
        f'<div class="ab-pic-counts"><span>executed on {devices}: <b>{_escape(executed)}</b></span>'
        f"<span>wanted: <b>{_escape(wanted)}</b></span>{mark}</div>"
    )
    flows = []
    for kind in counts:
        flow = _FLOWS.get(kind, _OTHER)
        said = _often([each[1:] for each in shown.yours if each[0] == kind], readable)
        title = f"{kind} between {devices}"
        words = f"{flow.words[0].upper()}{flow.words[1:]}."
        description = f"{words} Executed {said}. Wanted: {wanted}."
        image = _svg((_WIDTH, 158), title, description, _drawn(flow, shown.devices), stretch=1.3)
        caption = f'<p><b>{_escape(kind)}</b> {_escape(said)}. <span class="ab-pic-words">{words}</span></p>'
        flows.append(f'<div class="ab-pic-flow">{image}{caption}</div>')
    if not flows:
        parts = [
            *_devices(shown.devices, _ABOVE),
            _text(_middle(shown.devices), 60, "nothing is sent", "middle"),
        ]
        text = f"Nothing is sent between {devices}. Wanted: {wanted}."
        flows.append(_svg((_WIDTH, 66), "Nothing is sent", text, parts, stretch=1.3))
    return f'<div class="ab-pic">{head}{"".join(flows)}</div>'


def _counted(counts: Iterable[tuple[str, int]]) -> str:
    """The collectives of each kind: "1 all-reduce, 2 all-gathers"."""
    each = (f"{'?' if times < 0 else f'{times:,}'} {kind}{'' if times == 1 else 's'}" for kind, times in counts)
    return ", ".join(each) or "none"


def _often(found: Sequence[tuple[int, int]], readable: Callable[[int], str]) -> str:
    """How often a kind is executed, and its bytes, for each collective of that kind in the program."""
    said = []
    for (times, size), copies in Counter(found).items():
        number = "?" if times < 0 else f"{copies * times:,}"
        loop = "" if times == 1 else ", inside a loop of unknown length" if times < 0 else ", inside a loop"
        each = "" if number == "1" else " each"
        said.append(f"{TIMES} {number}{loop}, {readable(size)}{each}")
    return "; ".join(said)


def _places(devices: int) -> list[tuple[int, float]]:
    """The devices that are drawn, with the middle of each. With more than eight, one place is left for an ellipsis."""
    numbers = list(range(devices)) if devices <= 8 else [*range(6), -1, devices - 1]
    return [(number, _LEFT + place * _STEP + _BOX[0] / 2) for place, number in enumerate(numbers)]


def _middle(devices: int) -> float:
    places = _places(devices)
    return (places[0][1] + places[-1][1]) / 2


def _devices(devices: int, top: float, content: str = "", color: str = "") -> Iterator[str]:
    """A row of devices, each with its number, and with numbers, all parts of them, one part, or nothing in it."""
    width, height = _BOX
    places = _places(devices)
    for place, (number, middle) in enumerate(places):
        if number < 0:
            yield _text(middle, top + height / 2 + 4, "…", "middle")
            continue
        left = middle - width / 2
        count = 1 if content == "numbers" else len(places)
        part = (width - 5) / count
        for at in [place] if content == "one part" else range(count) if content else []:
            yield (
                f'<rect x="{left + 3 + at * part:.2f}" y="{top + 3:g}" width="{part - 1:.2f}" '
                f'height="{height - 6:g}" fill="{color}" fill-opacity="0.8"/>'
            )
        yield (
            f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="3" fill="none" '
            'stroke="var(--ab-muted)" stroke-width="1.25"/>'
        )
        yield _text(middle, top + height + 15 if top == _BELOW else top - 6, number, "middle")


def _drawn(flow: _Flow, devices: int) -> list[str]:
    """The devices before and after, and arrows for what they send."""
    color = "var(--ab-sum)" if flow.through == "sum" else "var(--ab-rows)"
    middles = [middle for number, middle in _places(devices) if number >= 0]
    start, end = _ABOVE + _BOX[1] + 3, _BELOW - 3
    parts = [_text(0, _ABOVE + 15, "before"), _text(0, _BELOW + 15, "after")]
    parts += _devices(devices, _ABOVE, flow.parts[0], "var(--ab-rows)")
    parts += _devices(devices, _BELOW, flow.parts[1], color)
    if flow.through:
        center, width = _middle(devices), 150.0
        for place, middle in enumerate(middles):
            at = center + width * ((place + 0.5) / len(middles) - 0.5)
            parts += (_arrow(middle, start, at, _BETWEEN - 2), _arrow(at, _BETWEEN + 22, middle, end))
        parts.append(
            f'<rect x="{center - width / 2:g}" y="{_BETWEEN:g}" width="{width:g}" height="20" rx="10" fill="{color}" '
            f'fill-opacity="0.2" stroke="{color}" stroke-width="1.25"/>'
        )
        return [*parts, _text(center, _BETWEEN + 14, flow.through, "middle", "var(--ab-text)")]
    for place, middle in enumerate(middles):
        if flow.to == "next":
            parts.append(_arrow(middle, start, middles[(place + 1) % len(middles)], end))
        elif flow.to == "others":
            parts += [_arrow(middles[0], start, middle, end)] if place else []
        else:
            # Those of the first device are strong, so that the eye can follow one of them.
            parts += (_arrow(middle, start, other, end, 0.3 if place else 1.0) for other in middles)
    return parts


def _arrow(x: float, y: float, to_x: float, to_y: float, opacity: float = 1.0) -> str:
    length = math.hypot(to_x - x, to_y - y)
    along, across = (to_x - x) / length, (to_y - y) / length
    neck_x, neck_y = to_x - 6 * along, to_y - 6 * across
    sides = (f"{neck_x - 3 * side * across:.1f} {neck_y + 3 * side * along:.1f}" for side in (1, -1))
    return (
        f'<g opacity="{opacity:g}" stroke="var(--ab-muted)" fill="var(--ab-muted)"><path d="M{x:.1f} {y:.1f}'
        f'L{neck_x:.1f} {neck_y:.1f}" stroke-width="1.25"/><path d="M{to_x:.1f} {to_y:.1f}L{"L".join(sides)}z" '
        'stroke="none"/></g>'
    )
