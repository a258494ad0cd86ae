"""Tables and paragraphs of plain text that fit a width."""

import dataclasses
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

WIDTH = 80  # characters of a line, by default

_GAP = "  "  # between two columns

# What is not broken at its spaces: code (a call, a text in quotes or in backquotes), and a number with its unit.
_CODE = r"[\w.]+\([^()\n]*\)|\"[^\"\n]*\"|(?<==)'[^'\n]*'|`[^`\n]*`"
_WHOLE = re.compile(rf"{_CODE}|\d (?:[KMGT]iB|B|ms|s)\b")


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table, and what may be done to it if the table is too wide.

    Args:
      name: the header.
      cells: the texts below it.
      is_left: aligned to the left; else to the right.
      drop: columns with a number are left out if needed, the highest number first. None: never.
      least: longer cells may be cut to this many characters, and at last to half as many. None: never.
      keeps_end: whether a cell that is cut shows its end; else its beginning.
      short: shorter texts for the header and cells, used last.
      full_name: what it is called where it is left out, if its header does not say enough.
    """

    name: str
    cells: tuple[str, ...]
    is_left: bool = False
    drop: int | None = None
    least: int | None = None
    keeps_end: bool = False
    short: Mapping[str, str] = dataclasses.field(default_factory=dict)
    full_name: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.name, *self.cells)

    @property
    def width(self) -> int:
        return max(map(len, self.texts))

    def cut(self, width: int) -> "Column":
        """The column with cells of at most `width` characters."""
        return dataclasses.replace(self, cells=tuple(_cut(cell, width, self.keeps_end) for cell in self.cells))

    def shortened(self) -> "Column":
        """The column with its short texts."""
        cells = tuple(self.short.get(cell, cell) for cell in self.cells)
        least = None if self.least is None else self.least // 2
        return dataclasses.replace(self, name=self.short.get(self.name, self.name), cells=cells, least=least)

    def lines(self) -> list[str]:
        """The header and the cells, padded to the width of the column."""
        side = "<" if self.is_left else ">"
        return [f"{text:{side}{self.width}}" for text in self.texts]


def text_table(columns: Iterable[Column], width: int | None = WIDTH) -> tuple[list[str], list[str]]:
    """The lines of a table, and the names of the columns that were left out so that it fits the width.

    Columns without text in their cells are not shown. Long cells are cut first, where a column allows it; then columns
    are left out; then short texts are used.

    >>> columns = [Column("a", ("1",)), Column("unimportant", ("2",), drop=1), Column("b", ("3",))]
    >>> text_table(columns, width=10)
    (['a  b', '1  3'], ['unimportant'])
    """
    every = [column for column in columns if any(column.cells)]
    kept = every if width is None else _kept(every, width)
    shown = kept if width is None else _cut_to_fit(kept, width)
    if width is not None and _width(shown) > width:
        shown = _cut_to_fit([column.shortened() for column in kept], width)
    rows = zip(*(column.lines() for column in shown), strict=True)
    left_out = [column.full_name or column.name for column in every if not any(column is other for other in kept)]
    return [_GAP.join(row).rstrip() for row in rows], left_out


def _kept(columns: list[Column], width: int) -> list[Column]:
    """The columns that fit the width, once their cells are cut."""
    while droppable := [column for column in columns if column.drop is not None]:
        if _width(_cut_to_fit(columns, width)) <= width:
            break
        least = max(droppable, key=lambda column: column.drop or 0)
        columns = [column for column in columns if column is not least]
    return columns


def _cut_to_fit(columns: list[Column], width: int) -> list[Column]:
    """Cuts cells, those of the widest column first, until the table fits or nothing more may be cut."""
    while _width(columns) > width:
        long = [place for place, column in enumerate(columns) if column.width > _floor(column)]
        if not long:
            break
        widest = max(long, key=lambda place: columns[place].width)
        columns = [*columns]
        columns[widest] = columns[widest].cut(columns[widest].width - 1)
    return columns


def _floor(column: Column) -> int:
    """The width that a column cannot go below."""
    return column.width if column.least is None else max(column.least, len(column.name))


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + len(_GAP) * (len(columns) - 1)


def _cut(text: str, width: int, keeps_end: bool) -> str:
    """At most `width` characters of a text, with dots for what is missing.

    >>> _cut("params['layers']", 12, True), _cut("dots_saveable", 8, False)
    ("...'layers']", 'dots_...')
    """
    if len(text) <= width:
        return text
    text = text.removeprefix("...") if keeps_end else text.removesuffix("...")
    return f"...{text[3 - width :]}" if keeps_end else f"{text[: width - 3]}..."


def wrapped(text: str, width: int | None = WIDTH) -> str:
    """The text in lines of at most `width` characters. Code in it, such as `f(x, y)`, is not broken.

    Line breaks in the text stay, and so does the indentation of a line.

    >>> print(wrapped("Pass the batch by position, as in loss(params, batch), or name it.", width=40))
    Pass the batch by position, as in
    loss(params, batch), or name it.
    """
    if width is None:
        return text
    return "\n".join(_wrapped_line(line, width) for line in text.split("\n"))


def _wrapped_line(line: str, width: int) -> str:
    # A character that is no space for textwrap stands for the spaces that stay.
    joined = _WHOLE.sub(lambda found: found[0].replace(" ", "\N{NULL}") if len(found[0]) <= width else found[0], line)
    indent = " " * (len(line) - len(line.lstrip()))
    lines = textwrap.wrap(joined, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\N{NULL}", " ")
