"""HTML for notebooks and reports: texts, tables and figures, and the style sheet that they share.

`in_notebook` makes what a notebook shows of an object. Its colours are mixed from the colour of the text around it, so
they are right on any background, whether the notebook, the page or the browser made it dark. There are no scripts, ids,
fonts or links, and all text is escaped. A report has the same tables and figures, and colours of its own.
"""

import functools
import html
import importlib.resources
from collections.abc import Iterable, Sequence

from anybatch.call.plots import Figure, Plot
from anybatch.call.tables import Column

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


def escape(text: object) -> str:
    """A text as HTML, also inside the quotes of an attribute.

    >>> escape("<b> & 'c'")
    '&lt;b&gt; &amp; &#x27;c&#x27;'
    """
    return html.escape(visible(str(text)))


@functools.cache
def style(name: str) -> str:
    """A style sheet of this folder: "display" for tables and figures, "notebook" for what else a notebook needs."""
    return importlib.resources.files("anybatch.call").joinpath(f"{name}.css").read_text("utf-8")


def in_notebook(*parts: str) -> str:
    """What a notebook shows: parts in HTML, with their style."""
    return f'<div class="anybatch"><style>\n{style("display")}{style("notebook")}</style>\n{"".join(parts)}</div>'


def paragraph(text: str, kind: str = "") -> str:
    """A text as a paragraph of HTML; nothing for an empty text. Line breaks stay, and indented lines are code."""
    if not text:
        return ""
    name = f' class="{kind}"' if kind else ""
    lines = [f"<code>{escape(line)}</code>" if line.startswith(" ") else escape(line) for line in text.split("\n")]
    return f"<p{name}>{'<br>'.join(lines)}</p>\n"


def html_table(
    columns: Iterable[Column],
    styles: Sequence[str],
    caption: str = "",
    pictures: tuple[int, str, Sequence[str]] | None = None,
) -> str:
    """A table that scrolls sideways where it is too wide. Columns without text are not shown.

    Args:
      columns: the header and cells of each.
      styles: of each row: "", "chosen", "muted" or "bad".
      caption: above it; may be empty.
      pictures: a column of drawings: its place, its header and its cells, in HTML.
    """
    shown = [column for column in columns if any(column.cells)]
    sides = [' class="left"' if column.is_left else "" for column in shown]
    heads = [f'<th scope="col"{side}>{escape(each.name)}</th>' for each, side in zip(shown, sides, strict=True)]
    rows = [
        [f"<td{side}>{escape(cell)}</td>" for cell, side in zip(row, sides, strict=True)]
        for row in zip(*(column.cells for column in shown), strict=True)
    ]
    if pictures is not None:
        place, head, cells = pictures
        heads.insert(place, f'<th scope="col">{head}</th>')
        rows = [[*row[:place], f"<td>{cell}</td>", *row[place:]] for row, cell in zip(rows, cells, strict=True)]
    body = [
        f'<tr class="{style}">{"".join(row)}</tr>' if style else f"<tr>{''.join(row)}</tr>"
        for row, style in zip(rows, styles, strict=True)
    ]
    named = f"<caption>{escape(caption)}</caption>\n" if caption else ""
    head = f"<thead><tr>{''.join(heads)}</tr></thead>\n" if any(column.name for column in shown) else ""
    label = f' role="region" aria-label="{escape(caption)}"' if caption else ""
    return (
        f'<div class="scroll" tabindex="0"{label}><table>\n{named}{head}<tbody>\n'
        + "\n".join(body)
        + "\n</tbody></table></div>\n"
    )


def html_figure(figure: Figure) -> str:
    """A figure: its title and legend, its plots, and its caption."""
    plots = "".join(map(svg, figure.plots))
    items = [f"<li>{_sample(style)}{escape(label)}</li>" for style, label in figure.legend]
    legend = f'<ul class="legend">\n{"".join(items)}\n</ul>\n' if items else ""
    caption = f'<p class="remark">{escape(figure.caption)}</p>\n' if figure.caption else ""
    return (
        f'<figure data-figure="{escape(figure.name)}">\n<figcaption><h3>{escape(figure.title)}</h3>\n{legend}'
        f"</figcaption>\n{plots}{caption}</figure>\n"
    )


def _sample(style: str) -> str:
    """A piece of a curve, or a point, for a legend."""
    shape = f'<path class="curve {style}" d="M1 5H23"/>'
    if "disc" in style:
        shape = f'<circle class="point {style}" cx="12" cy="5" r="4"/>'
    return f'<svg viewBox="0 0 24 10" aria-hidden="true">{shape}</svg>'


def svg(plot: Plot) -> str:
    """A plot as SVG. What the pointer is on is told at its lower edge; without a style sheet this is hidden."""
    parts = []
    for y, name in plot.y_ticks:
        parts.append(f'<path class="grid" d="M{plot.left} {y}H{plot.right}"/>')
        parts.append(_words(plot.left - 7, y + 4, name, "end"))
    for x, name in plot.x_ticks:
        parts.append(f'<path class="notch" d="M{x} {plot.bottom}v5"/>{_words(x, plot.bottom + 18, name, "middle")}')
    parts.append(f'<path class="base" d="M{plot.left} {plot.bottom}H{plot.right}"/>')
    parts.append(_words(0, plot.top - 12, plot.y.label))
    parts.append(_words(plot.right, plot.bottom + 36, plot.x.label, "end", "axis"))
    for x, label, anchor in plot.bands:
        parts.append(f'<path class="band" d="M{x} {plot.top}V{plot.bottom}"/>{_words(x, plot.top - 8, label, anchor)}')
    for level, label, anchor, x, y in plot.levels:
        line = f'<path class="level" d="M{plot.left} {level}H{plot.right}"/>'
        parts.append(line + _words(x, y, label, anchor, "name"))
    parts += [f'<path class="curve {style}" d="{path}"/>' for style, path in plot.curves]
    for left, width, value, text in plot.hovers:
        edges = f'x="{left}" y="{plot.top}" width="{width}" height="{plot.bottom - plot.top}"'
        place = "" if value is None else f'cx="{value[0]}" cy="{value[1]}"'
        mark = f'<circle class="mark" visibility="hidden" {place} r="3"/>' if place else ""
        parts.append(f'<g class="at"><rect class="hover" {edges}/>{mark}{_read(plot, text)}</g>')
    for x, y, radius, style, text in plot.points:
        point = f'<circle class="point {style}" cx="{x}" cy="{y}" r="{radius}"/>'
        around = f'<circle class="hover" cx="{x}" cy="{y}" r="{radius + 2}"/>'
        parts.append(f'<g class="at">{around}{point}{_read(plot, text)}</g>')
    name = f"plot {plot.screen}".strip()
    view, inside = f'viewBox="0 0 {plot.width} {plot.height}"', "\n".join(parts)
    return f'<svg class="{name}" {view} role="img" aria-label="{escape(plot.text)}">\n{inside}\n</svg>\n'


def _words(x: float, y: float, text: str, anchor: str = "start", kind: str = "tick") -> str:
    return f'<text class="{kind}" text-anchor="{anchor}" x="{round(x, 1)}" y="{round(y, 1)}">{escape(text)}</text>'


def _read(plot: Plot, text: str) -> str:
    """The text that is shown while the pointer is on something. It stands where no other text is."""
    return f'<text class="read" visibility="hidden" x="0" y="{plot.bottom + 36}">{escape(text)}</text>'
