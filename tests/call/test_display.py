"""What notebooks show of readings, plans, verifications and runs, as a browser shows it: on light and dark pages."""

import dataclasses
import html
import os
import re
import shutil

import jax.numpy as jnp
import pytest

import anybatch as ab
from anybatch.call.display import paragraph, visible
from anybatch.planning.measure import Bytes
from anybatch.planning.plan import Candidate, Devices, Plan
from anybatch.planning.strategy import Route
from anybatch.training.loop import Fitted
from anybatch.verification.comparison import LeafDifference
from anybatch.verification.verify import RouteCheck, Verification

sync_api = pytest.importorskip("playwright.sync_api")

MIB = 2**20
EVIL = "<script>document.title = 'taken over'</script> & <b>bold</b> \"quoted\""
QUIET = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]


def candidate(size, total, *, compiled=True, seconds=None, fits=True, **options):
    found = Bytes(MIB, 4 * MIB, 0, MIB, 20, total - 6 * MIB - 20) if compiled else None
    route = Route.FULL_BATCH if size == 4096 else Route.ONE_PASS
    named = {"remat": None, "reduce": "once", "method": None, "block_size": None} | options
    return Candidate(
        route, size, **named, bytes=found, predicted=total, seconds=seconds, fits=fits, is_full_batch=size == 4096
    )


def plan(reason="Chosen: microbatch_size=512, the fastest.", **changes):
    policy = "dots_with_no_batch_dims_saveable"
    candidates = (
        candidate(4096, 183 * MIB, fits=False),
        candidate(1024, 40 * MIB, compiled=False, fits=False),
        candidate(512, 12 * MIB, seconds=0.0123),
        candidate(64, 8 * MIB, seconds=0.0456),
        candidate(512, 10 * MIB, seconds=0.02, remat=policy, block_size=128, reduce="each"),
        candidate(8, 7 * MIB, compiled=False),
    )
    named = {
        "chosen": candidates[2],
        "candidates": candidates,
        "num_examples": 4096,
        "objective": "speed",
        "budget": 16 * MIB,
        "budget_source": 'memory="16MiB"',
        "reason": reason,
        "limits": "",
        "advice": "What would help: " + "more memory, " * 20,
        "devices": Devices(EVIL),
        "compilations": 3,
        "planning_seconds": 1.0,
    }
    return Plan(**named | changes)


def verification(ok=True):
    leaf = f"params['{EVIL}']"
    routes = tuple(
        RouteCheck(
            f"microbatch_size={size}", same, gap, leaf, 1e-14, gap, gap, (LeafDifference(leaf, gap, 1e-14),), 1e-7, 2e-6
        )
        for size, same, gap in ((1, True, 3e-16), (10, True, 0.0), (64, ok, 3e-16 if ok else 0.5))
    )
    why = None if ok else f"Because of {EVIL}:\n    file.py:3 ({EVIL})\nDo this."
    return Verification(ok, routes, 64, 100, "float64", "float32", (f"A note: {EVIL}.",), why)


def reading():
    return ab.read(lambda w, x: jnp.sum(jnp.max(x @ w @ (x @ w).T, axis=0)), jnp.ones((3, 2)), jnp.ones((12, 3)))


def run():
    rows = [{"step": step, "loss": 4.0 / step} for step in range(1, 11)]
    return Fitted(None, 10, rows, None, None, None, 12.5, examples=320, checkpoints=f"/runs/{EVIL}", log=None)


SHOWN = {
    "plan": plan,
    "nothing fits": lambda: plan(chosen=None, reason=EVIL),
    "verification": verification,
    "wrong gradient": lambda: verification(ok=False),
    "reading": reading,
    "run": run,
}

# Notebooks and pages, by what they do to what they show: the tags around it, and their style in the light and the dark.
_JUPYTER = """
body { --jp-layout-color0: %s; background: %s; color: %s; font: 14px/1.5 sans-serif; }
.jp-RenderedHTMLCommon table { border-collapse: collapse; margin: 0 auto; table-layout: fixed; font-size: 12px; }
.jp-RenderedHTMLCommon td, .jp-RenderedHTMLCommon th { padding: .5em; text-align: right; }
.jp-RenderedHTMLCommon tbody tr:nth-child(odd) { background: #808080; }
.jp-RenderedHTMLCommon tbody tr:hover { background: #808080; }
"""
_PLAIN = "body { background: %s; color: %s; font: 16px/1.5 sans-serif; }"
HOSTS = {
    ("jupyterlab", "light"): ("", 'data-jp-theme-light="true"', _JUPYTER % ("#fff", "#fff", "rgba(0,0,0,.87)")),
    ("jupyterlab", "dark"): ("", 'data-jp-theme-light="false"', _JUPYTER % ("#111", "#111", "rgba(255,255,255,.87)")),
    ("vscode", "light"): ("", 'class="vscode-light"', _PLAIN % ("#ffffff", "#3b3b3b")),
    ("vscode", "dark"): ("", 'class="vscode-dark"', _PLAIN % ("#1f1f1f", "#cccccc")),
    ("colab", "light"): ("", "", _PLAIN % ("#ffffff", "#212121")),
    ("colab", "dark"): ('theme="dark"', "", _PLAIN % ("#383838", "#d5d5d5")),
    ("furo", "light"): ("", 'data-theme="light"', _PLAIN % ("#ffffff", "#000000")),
    ("furo", "dark"): ("", 'data-theme="dark"', _PLAIN % ("#131416", "#cfd0d0")),
}

LOOK = """
() => {
  const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const luminance = (...colors) => {
    pixel.clearRect(0, 0, 1, 1);
    for (const color of colors) { pixel.fillStyle = color; pixel.fillRect(0, 0, 1, 1); }
    const [r, g, b] = [...pixel.getImageData(0, 0, 1, 1).data].map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = getComputedStyle(document.body).backgroundColor;
  const contrast = (color) => {
    const [dark, light] = [luminance(ground), luminance(ground, color)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const least = (query, property) => Math.min(99, ...[...document.querySelectorAll(query)]
    .map((e) => contrast(getComputedStyle(e)[property])));
  const all = (query, property) => [...new Set([...document.querySelectorAll(query)]
    .map((e) => getComputedStyle(e)[property]))];
  const size = (query) => [...document.querySelectorAll(query)].map((e) => e.getBoundingClientRect());
  return {
    words: least(".anybatch p, .anybatch li, .anybatch th, .anybatch td, .anybatch h3", "color"),
    labels: least(".anybatch svg text", "fill"), curves: least(".anybatch .curve", "stroke"),
    points: least(".anybatch .lane .point", "fill"),
    rows: all(".anybatch tbody tr", "backgroundColor"), first: all(".anybatch td:first-child", "textAlign"),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    scripts: document.scripts.length, title: document.title, bold: document.querySelectorAll("b").length,
    loaded: performance.getEntriesByType("resource").length,
    plots: size("svg.plot").map((r) => r.width), text: document.body.innerText,
  };
}
"""


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        assert not os.environ.get("CI"), "CI needs Chromium: notebooks are looked at in a browser"
        pytest.skip("no Chromium on PATH")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*QUIET, "--disable-component-update"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    page = browser.new_page()
    yield page
    page.close()


def show(page, content, host=("furo", "light"), width=736):
    """Shows it on a page of a host. The browser itself prefers the other scheme."""
    outer, inner, style = HOSTS[host]
    page.emulate_media(color_scheme={"light": "dark", "dark": "light"}[host[1]])
    page.set_viewport_size({"width": width, "height": 900})
    body = f'<body {inner}><div class="jp-RenderedHTMLCommon">{content}</div></body>'
    page.set_content(
        f"<!DOCTYPE html><html {outer}><head><title>notebook</title><style>{style}</style></head>{body}</html>"
    )
    return page.evaluate(LOOK)


@pytest.mark.parametrize("host", HOSTS, ids=" ".join)
def test_everything_can_be_read_on_light_and_dark_pages(page, host):
    for name, make in SHOWN.items():
        found = show(page, make()._repr_html_(), host)
        assert found["words"] >= 4.5 and found["labels"] >= 4.5, (name, found)
        assert found["curves"] >= 3 and found["points"] >= 3, (name, found)
        assert found["rows"] in ([], ["rgba(0, 0, 0, 0)"]) and found["first"] in ([], ["left"]), (name, found)


def test_colours_for_one_scheme_cannot_be_read_in_the_other(page):
    """The control."""
    fixed = plan()._repr_html_().replace("color: inherit; line-height", "color: #1b1f23; line-height")
    assert show(page, fixed, ("furo", "light"))["words"] >= 4.5
    assert show(page, fixed, ("furo", "dark"))["words"] < 2
    stripes = verification()._repr_html_().replace(".anybatch.anybatch", ".other")
    assert show(page, stripes, ("jupyterlab", "light"))["rows"] != ["rgba(0, 0, 0, 0)"]


@pytest.mark.parametrize("width", [320, 736, 1200])
def test_nothing_is_wider_than_the_page(page, width):
    for name, make in SHOWN.items():
        found = show(page, make()._repr_html_(), width=width)
        assert found["overflow"] == 0, name
        assert all(150 <= plot <= width for plot in found["plots"]), name
    wide = plan()._repr_html_().replace("overflow-x: auto", "")  # the control: the table does not scroll
    assert width > 736 or show(page, wide, width=width)["overflow"] > 0


@pytest.mark.parametrize("name", SHOWN)
def test_texts_are_escaped_and_nothing_is_loaded_or_run(page, name):
    shown = SHOWN[name]()
    content = shown._repr_html_()
    found = show(page, content)
    assert (found["scripts"], found["loaded"], found["title"]) == (0, 0, "notebook")
    assert "<script" not in content and "http" not in content and "url(" not in content and " id=" not in content
    assert found["bold"] == (name == "reading")
    if name != "reading":
        assert EVIL in found["text"]
    assert show(page, EVIL)["scripts"] == 1  # the control


def test_the_pointer_reads_the_values_of_a_candidate(page):
    show(page, plan()._repr_html_())
    read = "() => [...document.querySelectorAll('.read')].filter((e) => getComputedStyle(e).visibility === 'visible')"
    texts = f"() => ({read})().map((e) => e.textContent)"
    assert page.evaluate(texts) == []
    for figure, number, text in (
        ("memory", 0, "4,096 · 183.0 MiB · does not fit"),
        ("memory", 1, "1,024 · ~40.0 MiB · does not fit"),
        ("memory", 5, "512 · 12.0 MiB · 12.3 ms"),  # the chosen one is the last, on top of the others
        ("time", 0, "64 · 8.0 MiB · 45.6 ms"),
    ):
        page.locator(f'[data-figure="{figure}"] svg.plot .point').nth(number).hover(force=True)
        assert page.evaluate(texts) == [text]
        inside = "(e) => { const r = e.getBoundingClientRect(), p = e.closest('svg').getBoundingClientRect(); "
        inside += "return r.left >= p.left - 1 && r.right <= p.right + 1; }"
        assert page.evaluate(f"() => ({read})().every({inside})")
        axis = page.locator(f'[data-figure="{figure}"] .axis')
        assert axis.evaluate("(e) => getComputedStyle(e).visibility") == "hidden"  # it would be below the text


def test_a_long_policy_is_cut_where_the_pointer_reads_it():
    texts = re.findall(r'class="read"[^>]*>(.*?)</text>', plan()._repr_html_())
    assert max(map(len, texts)) <= 54
    assert any(text.endswith("\N{HORIZONTAL ELLIPSIS}") and "blocks of 128, dots_with" in text for text in texts)


def test_the_memory_axis_is_logarithmic_and_shows_the_budget_and_the_choice(page):
    figure = plan().figures()[0]
    (plot,) = figure.plots
    assert plot.y.is_log and [name for _, name in plot.y_ticks] == ["8 MiB", "16 MiB", "32 MiB", "64 MiB", "128 MiB"]
    gaps = [upper - lower for (lower, _), (upper, _) in zip(plot.y_ticks[1:], plot.y_ticks, strict=False)]
    assert max(gaps) - min(gaps) < 0.3  # of a pixel: every doubling is as far
    assert [label for _, label, *_ in plot.levels] == ["budget 16.0 MiB"] and len(plot.bands) == 1
    far = plan(budget=2**50).figures()[0]
    assert far.plots[0].levels == [] and far.caption == "The budget is 1024.0 TiB, far outside the plot."


def test_a_plan_of_one_candidate_has_no_plot():
    one = plan().candidates[:1]
    assert plan(candidates=one, chosen=None).figures() == []
    assert "<svg" not in plan(candidates=one, chosen=None)._repr_html_()


def test_the_memory_saved_is_in_the_first_line():
    assert (
        '<p class="lead">microbatch_size=512: 12.0 MiB instead of 183.0 MiB, 15 times less</p>' in plan()._repr_html_()
    )
    full = plan().candidates[0]
    assert plan(chosen=full).memory_saved is None and "less</p>" not in plan(chosen=full)._repr_html_()
    assert plan(chosen=None).memory_saved is None


def test_indented_lines_are_code_and_line_breaks_stay():
    assert paragraph("Look:\n    f(<x>)") == "<p>Look:<br><code>    f(&lt;x&gt;)</code></p>\n"
    assert paragraph("") == ""
    assert html.unescape(paragraph("a\x1b")).startswith("<p>a\\x1b") and visible("a\u202eb") == "a\\u202eb"


def test_every_line_of_a_plan_fits_80_columns():
    """The widest one: over a mesh, with blocks, policies, times and large numbers."""
    mesh = plan(devices=Devices("NVIDIA H200 Tensor Core", 1024), budget=140 * 2**30, budget_source="memory='94.2%'")
    large = [
        dataclasses.replace(
            each,
            predicted=1023 * 2**30,
            bytes=each.bytes and dataclasses.replace(each.bytes, batch=1023 * 2**30),
            seconds=12.3456,
        )
        for each in mesh.candidates
    ]
    for shown in (plan(), mesh, dataclasses.replace(mesh, candidates=tuple(large), chosen=large[4])):
        lines = str(shown).splitlines()
        assert max(map(len, lines)) <= 80 and repr(shown) == str(shown)
        words = str(shown).split()
        for needed in ("route", "blocks", "remat", "reduce", "total", "time", "fits", "128", "each", "<-"):
            assert needed in words, needed
        complete = shown.text(width=None)
        assert max(map(len, complete.splitlines())) > 100 and "activations" in complete  # the control
        assert "dots_with_no_batch_dims_saveable" in complete
