"""Turns Markdown and Python code into HTML.

Markdown may come from somebody else's course. So HTML in it is shown as text, and links can only lead to web pages:
nothing in it can run in the browser.
"""

import functools
import html
from collections.abc import Iterator, Sequence
from typing import Any
from xml.etree import ElementTree

import pygments
from latex2mathml import converter
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import formatters, lexers, util

MATHML = "http://www.w3.org/1998/Math/MathML"
_TAGS = (
    *("math", "mrow", "mi", "mn", "mo", "ms", "mtext", "mspace", "mstyle", "mfrac", "msqrt", "mroot", "mpadded"),
    *("msub", "msup", "msubsup", "munder", "mover", "munderover", "mmultiscripts", "mtable", "mtr", "mtd", "mphantom"),
)
_ATTRIBUTES = (
    *("display", "displaystyle", "scriptlevel", "mathvariant", "stretchy", "fence", "form", "separator", "accent"),
    *("minsize", "maxsize", "lspace", "rspace", "width", "height", "depth", "linethickness", "columnalign", "xmlns"),
    *("rowspacing", "columnspacing", "movablelimits", "symmetric", "largeop"),
)


def segments(markdown: str) -> Iterator[tuple[str | None, str]]:
    r"""Cuts Markdown at its code blocks. Yields (None, the HTML of a part) or (the language, the code of a block).

    >>> list(segments("Hello *you*" + chr(10) * 2 + "```python" + chr(10) + "x = 1" + chr(10) + "```"))
    [(None, '<p>Hello <em>you</em></p>\n'), ('python', 'x = 1')]
    """
    parser = _parser()
    pending: list[Any] = []
    for token in parser.parse(markdown):
        if token.type in ("fence", "code_block") and token.level == 0:
            if pending:
                yield None, _rendered(parser, pending)
                pending = []
            yield token.info.strip() or "text", token.content.rstrip("\n")
        else:
            pending.append(token)
    if pending:
        yield None, _rendered(parser, pending)


def html_of(markdown: str) -> str:
    """The HTML of a Markdown text, with its code blocks."""
    return "".join(part if language is None else highlighted(part, language) for language, part in segments(markdown))


def highlighted(source: str, language: str = "python") -> str:
    """The HTML of a code block, with a class for each kind of token."""
    try:
        lexer = lexers.get_lexer_by_name(language)
    except util.ClassNotFound:
        lexer = lexers.get_lexer_by_name("text")
    inner = pygments.highlight(source, lexer, formatters.HtmlFormatter(nowrap=True)).rstrip("\n")
    # The box scrolls if its lines are long, so that it must be reachable by keyboard.
    return f'<pre class="ab-code" tabindex="0" role="region" aria-label="code"><code>{inner}</code></pre>'


def _rendered(parser: MarkdownIt, tokens: Sequence[Any]) -> str:
    return parser.renderer.render(tokens, parser.options, {})


@functools.cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable("table").use(dollarmath_plugin, renderer=_maths)
    parser.add_render_rule("link_open", _link)
    parser.add_render_rule("image", _image)
    parser.add_render_rule("fence", lambda self, tokens, index, *_: highlighted(tokens[index].content.rstrip("\n")))
    return parser


def _maths(formula: str, options: dict[str, Any]) -> str:
    """MathML, which browsers show without any script; the source if it is not valid.

    The converter does not escape what is in a formula. So only known elements and attributes are let through.
    """
    display = "block" if options["display_mode"] else "inline"
    try:
        tree = ElementTree.fromstring(converter.convert(formula, xmlns=MATHML, display=display))
    except Exception:  # the converter raises many kinds of errors
        return f"<code>{html.escape(formula)}</code>"
    for element in tree.iter():
        known = element.tag.removeprefix(f"{{{MATHML}}}") in _TAGS
        if not known or not set(element.attrib) <= set(_ATTRIBUTES):
            return f"<code>{html.escape(formula)}</code>"
        element.tag = element.tag.removeprefix(f"{{{MATHML}}}")
    return ElementTree.tostring(tree, "unicode")


def _link(self: Any, tokens: Sequence[Any], index: int, options: Any, env: Any) -> str:
    address = str(tokens[index].attrs.get("href", ""))
    if not address.startswith(("https://", "http://", "#")):
        tokens[index].attrs["href"] = "#"
    tokens[index].attrs |= {"rel": "noopener noreferrer", "target": "_blank"}
    return self.renderToken(tokens, index, options, env)


def _image(self: Any, tokens: Sequence[Any], index: int, options: Any, env: Any) -> str:
    """The description of an image: images of other sites are not loaded."""
    return html.escape(tokens[index].content)
