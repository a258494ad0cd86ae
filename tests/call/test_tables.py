"""Tables and paragraphs of text that fit a width."""

import textwrap

import pytest

from anybatch.call.tables import Column, text_table, wrapped

WIDE = [
    Column("route", ("full batch", "one pass"), is_left=True),
    Column("policy", ("", "dots_with_no_batch_dims_saveable"), is_left=True, least=16),
    Column("first", ("1.0 MiB", "2.0 MiB"), drop=2),
    Column("second", ("3.0 MiB", "4.0 MiB"), drop=1),
    Column("empty", ("", "")),
    Column("", ("", "<- chosen"), short={"<- chosen": "<-"}, is_left=True),
]


def test_without_a_width_everything_is_shown():
    lines, left_out = text_table(WIDE, None)
    assert left_out == [] and lines == [
        "route       policy                              first   second",
        "full batch                                    1.0 MiB  3.0 MiB",
        "one pass    dots_with_no_batch_dims_saveable  2.0 MiB  4.0 MiB  <- chosen",
    ]


@pytest.mark.parametrize(
    "width, cell, left_out, mark",
    [
        (73, "dots_with_no_batch_dims_saveable", [], "<- chosen"),
        (72, "dots_with_no_batch_dims_save...", [], "<- chosen"),
        (57, "dots_with_no_...", [], "<- chosen"),
        (56, "dots_with_no_batch_di...", ["first"], "<- chosen"),
        (47, "dots_with_no_batch_di...", ["first", "second"], "<- chosen"),
        (24, "dots_...", ["first", "second"], "<-"),
    ],
)
def test_cells_are_cut_then_columns_are_left_out_then_texts_are_short(width, cell, left_out, mark):
    lines, dropped = text_table(WIDE, width)
    assert dropped == left_out and max(map(len, lines)) <= width
    assert cell in lines[2] and lines[2].endswith(mark)


def test_a_cell_may_keep_its_end():
    names = Column("worst at", ("params['layers']['kernel']", "v"), is_left=True, least=12, keeps_end=True)
    lines, _ = text_table([names], 15)
    assert lines == ["worst at", "...']['kernel']", "v"]


TEXT = (
    "What would help: allow more memory with memory=8 * 2**20, or call ab.verify(loss, params, batch) on "
    '"a text with spaces in it" before it; 885.8 KiB of it are the parameters, and 12.5 ms is its time.'
)


@pytest.mark.parametrize("width", range(30, 90, 3))
def test_code_and_units_are_not_broken(width):
    lines = wrapped(TEXT, width).split("\n")
    assert max(map(len, lines)) <= width and " ".join(lines) == TEXT
    for whole in ("ab.verify(loss, params, batch)", "885.8 KiB", "12.5 ms", '"a text with spaces in it"'):
        assert len(whole) > width or any(whole in line for line in lines)


def test_textwrap_alone_would_break_them():
    """The control."""
    lines = [line for width in range(30, 90, 3) for line in textwrap.wrap(TEXT, width)]
    assert not all("ab.verify(loss, params, batch)" in line for line in lines if "ab.verify" in line)


def test_line_breaks_and_indentation_stay():
    assert wrapped("one\n    two three four\nfive", 14) == "one\n    two three\n    four\nfive"
    assert wrapped("a" * 100, 80) == "a" * 100  # a word that is too long, such as a path, stays whole
    assert wrapped(TEXT, None) == TEXT
