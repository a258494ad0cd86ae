"""The colours of the pages: text can be read on every background, in light and in dark."""

import pathlib
import re

import pytest

import anybatch.learn.web

STYLE = pathlib.Path(anybatch.learn.web.__file__).with_name("style.css").read_text()
TEXTS = (
    "text muted accent good bad warn yours reference full rows sum head same keyword string comment number name".split()
)
BACKGROUNDS = ("bg", "surface", "raised")


def colours(selector):
    block = re.search(rf"^{re.escape(selector)} \{{(.*?)^\}}", STYLE, re.MULTILINE | re.DOTALL)[1]
    return dict(re.findall(r"--ab-([\w-]+): (#[0-9a-f]{6});", block))


def luminance(colour):
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("selector", ["body", "body.body--dark"])
def test_text_has_enough_contrast(selector):
    known = colours(selector)
    low = {
        (text, back): round(contrast(known[text], known[back]), 2)
        for text in TEXTS
        for back in BACKGROUNDS
        if contrast(known[text], known[back]) < 4.5
    }
    assert not low
    assert contrast(known["on-accent"], known["accent"]) >= 4.5


def test_that_comparison_can_fail():
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#58a6ff", "#ffffff") < 4.5
