"""Markdown as HTML: what a course may say, and that nothing in it can run."""

import re

import pytest

from anybatch.learn.catalogue import Course
from anybatch.learn.web.text import highlighted, html_of, segments

HOSTILE = [
    "<script>alert(1)</script>",
    'a <img src=x onerror="alert(1)"> b',
    "<svg onload=alert(1)>",
    "[a](javascript:alert(1))",
    "[a](JaVaScRiPt:alert(1))",
    "[a](data:text/html;base64,PHNjcmlwdD4=)",
    "[a](//evil.example/x)",
    "![<script>](https://evil.example/pixel.png)",
    '<https://evil.example/?q="onmouseover=alert(1)>',
    "| a |\n|---|\n| <script>alert(1)</script> |",
    "# <iframe src=javascript:alert(1)>",
    "```html\n</code></pre><script>alert(1)</script>\n```",
    '```"><script>alert(1)</script>\nx\n```',
    "$</math><script>alert(1)</script>$",
    "$\\href{javascript:alert(1)}{x}$",
    "$\\text{<img src=x onerror=alert(1)>}$",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_nothing_in_a_foreign_course_can_run(source):
    made = html_of(source)
    # Every tag that is really a tag, and its attributes.
    tags = re.findall(r"<[a-zA-Z][^>]*>", made)
    assert not re.search(r"<\s*(script|img|svg|iframe|object|style)", made, re.IGNORECASE), made
    assert not any(re.search(r"\son\w+\s*=", tag) for tag in tags), made
    assert not any(
        re.search(r"(href|src|xlink:href)\s*=\s*[\"']?\s*(javascript|data|//)", tag, re.IGNORECASE) for tag in tags
    ), made


def test_that_comparison_can_fail():
    assert re.search(r"<\s*script", "<p><script>alert(1)</script></p>")


def test_text_maths_tables_and_code():
    made = html_of("## Why\n\n*A* `b` and $x^2$.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n- [JAX](https://docs.jax.dev)\n")
    for part in ("<h2>Why</h2>", "<em>A</em>", "<code>b</code>", "<math", "<td>1</td>", 'href="https://docs.jax.dev"'):
        assert part in made
    assert 'rel="noopener noreferrer"' in made


def test_a_formula_that_is_not_valid_is_shown_as_it_is():
    assert "frac" in html_of("$\\frac{1}{$")


def test_code_is_cut_out_so_that_it_can_be_copied():
    assert [kind for kind, _ in segments("a\n\n```python\nx = 1\n```\n\nb\n\n```\ny\n```\n")] == [
        None,
        "python",
        None,
        "text",
    ]
    assert '<span class="k">def</span>' in highlighted("def f(): pass")


@pytest.mark.parametrize("exercise", Course.builtin().exercises, ids=lambda exercise: exercise.name)
def test_pages_of_the_course_have_no_markdown_left(exercise):
    for source in (exercise.page, exercise.other_ways_page, *exercise.hints):
        prose = re.sub(r"<(code|pre)\b.*?</\1>", "", html_of(source), flags=re.DOTALL)
        assert not re.search(r"\*\*|```|^#|\$\$", prose, re.MULTILINE), prose
