"""The report, also as a real browser shows it."""

import dataclasses
import html
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anybatch as ab
from anybatch.call.plots import Series, thinned
from anybatch.report import Report
from anybatch.report.figures import column, smoothed

FIGURES = [
    "loss",
    "noise_scale",
    "gradient_norm",
    "eval.accuracy",
    "aux.entropy",
    "tokens_per_second",
    "memory",
    "time",
]
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
EVIL = "<script>document.title = 'taken over'</script> & <b>bold</b>"


def rows(number, **others):
    random = np.random.default_rng(0)
    history = []
    for step in range(1, number + 1):
        row = {"step": step, "loss": 1.3 + 3 * math.exp(-step / 40) + 0.05 * random.normal(), "skipped": int(step > 60)}
        row |= {"gradient_norm": 1 / step, "noise_scale": 100.0 * step**0.4, "aux.entropy": 2.0 + random.normal()}
        row |= {"examples_per_second": 900.0, "tokens_per_second": 9e5 + 1e5 * random.normal(), "seconds": 0.1 * step}
        if step % 20 == 0:
            row |= {"eval.loss": 1.4 + 3 * math.exp(-step / 40), "eval.accuracy": 1 - 1 / step}
        history.append(row | others)
    return history


def timed(plan):
    """The plan with times that are the same on every machine."""
    seconds = {each: 1e-4 * (1 + 8 / each.microbatch_size) if each.fits else None for each in plan.candidates}
    candidates = {each: dataclasses.replace(each, seconds=seconds[each]) for each in plan.candidates}
    return dataclasses.replace(plan, chosen=candidates[plan.chosen], candidates=tuple(candidates.values()))


@pytest.fixture(scope="module")
def report():
    """A report with all sections, from a small loss."""
    params = {"w": jnp.ones((8, 16)), "v": jnp.ones((16,))}
    batch = {"x": jnp.sin(jnp.arange(512.0)).reshape(64, 8), "y": jnp.cos(jnp.arange(64.0))}

    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)

    history = rows(200)
    history[70]["loss"] = math.nan
    history[71]["loss"] = None
    return Report(
        title=f"A run of {EVIL}",
        history=history,
        plan=timed(ab.explain(loss, params, batch, memory="7KiB", timed=False)),
        reading=ab.read(loss, params, batch),
        verification=ab.verify(loss, params, batch, microbatch_sizes=(3, 16)),
        noise=ab.noise_scale(loss, microbatch_size=8)(params, batch)[2],
        samples=[("before", f"\x00\x1b[31m{EVIL}"), ("after 200 steps", "To be, or not to be")],
        settings={"learning_rate": 3e-4, EVIL: EVIL, "path": "no/space/to/break/at" * 20},
        notes=[EVIL],
    )


# --- in a browser ---------------------------------------------------------------------------------------------------

# Each page is shown in an iframe as wide as a screen. This script, outside the iframes, inspects them.
LOOK = """
const size = (e) => { const r = e.getBoundingClientRect(); return [r.width, r.height]; };
function apart(texts) {
  const boxes = texts.map((e) => e.getBoundingClientRect());
  return boxes.every((a, i) => boxes.slice(i + 1).every((b) =>
    a.right <= b.left || b.right <= a.left || a.bottom - 2 <= b.top || b.bottom - 2 <= a.top));
}
function look(frame) {
  const page = frame.contentDocument, view = frame.contentWindow, figures = {};
  for (const figure of page.querySelectorAll("figure")) {
    const plots = [...figure.querySelectorAll("svg.plot")].filter((e) => size(e)[0] > 0);
    const inside = (query) => plots.flatMap((plot) => [...plot.querySelectorAll(query)]);
    const labels = "text:not(.read)", others = inside("text:not(.read, .axis)");
    figures[figure.dataset.figure] = {
      plots: plots.map(size), labels: plots.map((e) => e.getAttribute("aria-label")),
      curves: inside(".curve").map(size), apart: apart(inside(labels)),
      ink: inside(".curve").map((e) => view.getComputedStyle(e).stroke),
      text: inside(labels).map((e) => view.getComputedStyle(e).fill)[0],
      font: Math.min(...plots.map((e) => size(e)[0] / e.viewBox.baseVal.width
        * parseFloat(view.getComputedStyle(e.querySelector("text")).fontSize))),
      outside: inside("text").filter((e) => {
        const r = e.getBoundingClientRect(); return r.left < 0 || r.right > view.innerWidth; }).length,
      reads: inside(".read").map((e) => e.textContent),
      readsShown: inside(".read").filter((e) => view.getComputedStyle(e).visibility !== "hidden").length,
      readsApart: inside(".read").every((e) => apart([e, ...others])),
    };
  }
  return {
    figures, width: view.innerWidth, overflow: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    page: view.getComputedStyle(page.body).backgroundColor, text: view.getComputedStyle(page.body).color,
    loaded: view.performance.getEntriesByType("resource").length, scripts: page.scripts.length, title: page.title,
    heading: page.querySelector("h1").textContent, bold: page.querySelectorAll("b").length,
    samples: [...page.querySelectorAll("pre")].map((e) => e.textContent),
  };
}
window.onload = () => document.body.setAttribute(
  "data-found", JSON.stringify([...document.querySelectorAll("iframe")].map(look)));
"""


def seen(pages, scheme):
    """What the script finds in pages, given as (page, width). One browser shows all of them, since it starts slowly."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        assert not os.environ.get("CI"), "CI needs Chromium: the report is looked at in a browser"
        pytest.skip("no Chromium on PATH")
    # The policy that forbids a page to load anything is removed, so that an attempt to load something is seen.
    frames = [
        f'<iframe width="{width}" height="900" srcdoc="{html.escape(POLICY.sub("", page))}"></iframe>'
        for page, width in pages
    ]
    with tempfile.TemporaryDirectory() as folder:
        wall = pathlib.Path(folder, "wall.html")
        head = '<!DOCTYPE html><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        wall.write_text(f"{head}<script>{LOOK}</script><body>{''.join(frames)}</body>", "utf-8", "replace")
        quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
        quiet += ["--disable-component-update", "--disable-sync", f"--user-data-dir={folder}/profile", "--no-sandbox"]
        colors = [f"--blink-settings=preferredColorScheme={'0' if scheme == 'dark' else '1'}"]
        command = [browser, "--headless", *quiet, *colors, "--dump-dom", wall.as_uri()]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'data-found="([^"]*)"', result.stdout)
    assert found, result.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


def faults(view, expected):
    """The faults of a page, from what the script found."""
    found = [] if sorted(view["figures"]) == sorted(expected) else [f"figures: {sorted(view['figures'])}"]
    for name, figure in view["figures"].items():
        if len(figure["plots"]) != 1 or min(figure["plots"][0]) < 150:
            found.append(f"{name}: not visible")
        if not figure["curves"] or any(width < 50 for width, _ in figure["curves"]):
            found.append(f"{name}: no curve")
        if max((height for _, height in figure["curves"]), default=0) < 20:
            found.append(f"{name}: flat")
        if figure["outside"] or not figure["apart"] or figure["font"] < 10:
            found.append(f"{name}: text that cannot be read")
        if not all(figure["labels"]):
            found.append(f"{name}: no words")
        if not figure["reads"] or figure["readsShown"] or not figure["readsApart"]:
            found.append(f"{name}: nothing to hover over")
    found += ["overflows"] if view["overflow"] > 0 else []
    found += ["loads something"] if view["loaded"] else []
    found += ["has a script"] if view["scripts"] else []
    return found


@pytest.fixture(scope="module")
def views(report):
    page = report.html()
    assert POLICY.search(page)
    controls = {
        "no curve": re.sub(r'(<path class="curve[^"]*") d="[^"]*"', r"\1", page),
        "overflows": page.replace("</main>", '<div style="width: 1200px">wide</div></main>'),
        "loads something": page.replace("</main>", '<img src="http://127.0.0.1:9/missing.png" alt=""></main>'),
        "has a script": page.replace("</main>", "<script>1</script></main>"),
        "text that cannot be read": page.replace("<text ", '<text textLength="300" '),
        "nothing to hover over": page.replace('class="read" visibility="hidden"', 'class="read"'),
    }
    screens = [(page, 1100), (page, 390), (page, 720), (Report("Only", rows(60)).html(), 390)]
    light = seen([*screens, *((control, 1100) for control in controls.values())], "light")
    dark = seen([(page, 1100)], "dark")
    return {
        "light": light[: len(screens)],
        "dark": dark[0],
        "controls": dict(zip(controls, light[len(screens) :], strict=True)),
    }


@pytest.mark.full
def test_every_plot_is_visible_on_every_screen(views):
    *complete, history_only = views["light"]
    assert [view["width"] for view in complete] == [1100, 390, 720]
    for view in [*complete, views["dark"]]:
        assert faults(view, FIGURES) == []
    history_alone = [name for name in FIGURES if name not in ("memory", "time")]
    assert faults(history_only, history_alone) == []


@pytest.mark.parametrize(
    "fault",
    ["no curve", "overflows", "loads something", "has a script", "text that cannot be read", "nothing to hover over"],
)
def test_faults_are_found(views, fault):
    assert any(fault in found for found in faults(views["controls"][fault], FIGURES))


def test_the_pointer_reads_values_in_every_plot(views):
    figures = views["light"][0]["figures"]
    assert len(figures["loss"]["reads"]) == 60 + 10  # columns, and the points of the evaluations
    assert figures["loss"]["reads"][0].startswith("step 1 · loss 4.2") and "smoothed" in figures["loss"]["reads"][0]
    assert "step 20 · eval.loss 3.22" in figures["loss"]["reads"]
    assert any(re.fullmatch(r"8 · ~?\d\.\d KiB · 0\.200 ms", text) for text in figures["memory"]["reads"])
    assert all(figure["readsShown"] == 0 for figure in figures.values())


def test_light_and_dark_differ_in_page_and_plots(views):
    light, dark = views["light"][0], views["dark"]
    assert (light["page"], dark["page"]) == ("rgb(255, 255, 255)", "rgb(21, 24, 27)")
    assert light["text"] != dark["text"]
    for name in FIGURES:
        one, other = light["figures"][name], dark["figures"][name]
        assert one["text"] != other["text"]
        assert all(ink != another for ink, another in zip(one["ink"], other["ink"], strict=True))


def test_markup_in_texts_is_shown_as_text(views, report):
    view = views["light"][0]
    assert view["title"] == view["heading"] == f"A run of {EVIL}"
    assert view["samples"] == [f"\\x00\\x1b[31m{EVIL}", "To be, or not to be"]
    assert (view["scripts"], view["bold"]) == (0, 0)
    assert "<script" not in report.html()


# --- the page -------------------------------------------------------------------------------------------------------


def headings(page):
    return re.findall(r"<h([1-6])>(.*?)</h\1>", page)


def test_headings_are_in_order_and_all_there(report):
    levels = [int(level) for level, _ in headings(report.html())]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert [text for level, text in headings(report.html()) if level == "2"] == [
        *("Training", "Memory and time", "How the loss uses its examples", "Verification", "Samples", "Settings"),
        "Environment",
    ]


def test_empty_sections_have_no_heading():
    page = Report("Nothing", [], environment={}).html()
    assert headings(page) == [("1", "Nothing")]
    assert "<svg" not in page and "<table" not in page and "<dl" not in page
    page = Report("One row", rows(1), environment={}).html()
    assert [text for _, text in headings(page)] == ["One row"]
    assert "<svg" not in page  # one point is no curve


def heads(page):
    """The key figures by label: their style, value and note."""
    pattern = (
        r'<div(?: class="(\w+)")?><dt>(.*?)</dt><dd class="value">(.*?)</dd>(?:<dd class="note">(.*?)</dd>)?</div>'
    )
    return {label: (style, value, note) for style, label, value, note in re.findall(pattern, page)}


def test_key_figures(report):
    plan, full_batch = report.plan, report.plan.candidates[0]
    assert full_batch.is_full_batch and plan.microbatch_size < 64
    page = report.html()
    figures = {label: value for label, (_, value, _) in heads(page).items()}
    assert figures["Steps"] == "200" and "in 20 s, 140 skipped" not in page and "in 20 s, 1 skipped" in page
    assert figures["Effective batch"] == "64" and figures["Microbatch"] == str(plan.microbatch_size)
    assert figures["Loss"] == f"{report.history[-1]['loss']:.4g}" and figures["Throughput"] == "900"
    assert figures["Gradient"] == "verified" and "Memory" not in figures  # the memory is above, in large


def hero(page):
    """The texts of the hero, and the width of its second bar in percent. None if there is none."""
    found = re.search(r'<div class="hero">(.*?)</div>', page, re.S)
    if found is None:
        return None
    words = re.findall(r"<(?:span class|p class)[^>]*>([^<]+)<", found[1])
    return words, float(re.findall(r"width: ([\d.]+)%", found[1])[1])


def test_the_memory_saved_stands_above_everything(report):
    full, chosen = report.plan.candidates[0].total, report.plan.chosen.total
    words, share = hero(report.html())
    assert words[:3] == [f"{full / 1024:.1f} KiB", "→", f"{chosen / 1024:.1f} KiB"]
    assert words[3].startswith(f"{int(10 * full / chosen) / 10:g} times less memory than the full batch of 64 examples")
    assert re.search(r", and the same gradient: it differs by \S+ at most\.$", words[3])
    assert share == pytest.approx(100 * chosen / full, abs=0.01)
    page = report.html()
    assert page.index("<h1>") < page.index('<div class="hero">') < page.index('<dl class="key"')
    large = dataclasses.replace(report.plan, budget=2**40, chosen=report.plan.candidates[0])
    page = dataclasses.replace(report, plan=large).html()  # the control: the full batch fits, and nothing is saved
    assert hero(page) is None and heads(page)["Memory"] == ("", f"{full / 1024:.1f} KiB", "of 1.0 TiB allowed")


def test_the_same_gradient_is_claimed_only_if_it_was_verified(report):
    wrong = dataclasses.replace(report.verification, ok=False)
    for verification in (None, wrong):
        words, _ = hero(dataclasses.replace(report, verification=verification).html())
        assert words[3].endswith("than the full batch of 64 examples.")
    page = dataclasses.replace(report, verification=wrong).html()
    assert page.index('<p class="alarm"') < page.index('<div class="hero">')


def test_blocks_and_policies_are_in_the_table(report):
    chosen = dataclasses.replace(report.plan.chosen, block_size=48, remat="dots_saveable")
    plan = dataclasses.replace(report.plan, chosen=chosen, candidates=(report.plan.candidates[0], chosen))
    page = dataclasses.replace(report, plan=plan).html()
    row = re.search(r'<tr class="chosen">(.*?)</tr>', page)[1]
    assert "<td>48</td>" in row and "dots_saveable" in row


@pytest.mark.parametrize("value", [math.nan, math.inf, None], ids=str)
def test_a_loss_that_is_not_finite_is_shown_at_the_head(value):
    finite = [{"step": step, "loss": 3 - step / 100} for step in range(1, 100)]
    broken = [row | {"loss": value} if row["step"] >= 50 else row for row in finite]
    assert heads(Report("Broken", broken).html())["Loss"] == ("wrong", "not finite", "last 2.51 at step 49")
    never = [row | {"loss": value} for row in finite]
    assert heads(Report("Never", never).html())["Loss"] == ("wrong", "not finite", "in all 99 rows")
    once = [
        row | {"loss": value} if row["step"] == 50 else row for row in finite
    ]  # the control: the loss became finite again
    assert heads(Report("Once", once).html())["Loss"] == ("", "2.01", "from 2.99 at step 1")


def test_a_wrong_gradient_is_shown():
    def loss(w, x):
        return jnp.mean((w * x - 1) ** 2)

    wrong = ab.verify(loss, 2.0, jnp.arange(4.0), reduction="sum", microbatch_sizes=(1, 3))
    page = Report("Wrong", [], verification=wrong).html()
    assert page.count('<tr class="bad">') == 2 and "All routes give the gradient" not in page
    assert html.escape("Pass reduction=", quote=False) in page
    assert heads(page)["Gradient"] == ("wrong", "different", "differs by 3")
    head = page[page.index("<header>") : page.index("</header>")]
    alarm = re.search(r'<p class="alarm" role="alert">(.*?)</p>', head)[1]
    assert alarm.startswith("Routes differ: 2 of 2 do not give the gradient of the full batch.")
    assert "The worst, microbatch_size=1, differs by 3 at " in alarm


def test_the_worst_route_is_one_that_fails_and_nan_is_worst_of_all(report):
    same = report.verification.routes[0]
    assert same.ok and '<p class="alarm"' not in report.html()

    def alarm(*differences):
        routes = [
            dataclasses.replace(same, name=f"route {place}", ok=False, gradient=difference, leaves=())
            for place, difference in enumerate(differences)
        ]
        coarse = dataclasses.replace(same, gradient=1e9)  # the control: a large difference that is allowed
        failed = dataclasses.replace(report.verification, ok=False, routes=(coarse, *routes))
        return re.search(r'<p class="alarm" role="alert">(.*?)</p>', Report("Wrong", [], verification=failed).html())[1]

    assert "2 of 3" in alarm(0.5, 0.25) and "The worst, route 0, differs by 0.5" in alarm(0.5, 0.25)
    rounded = dataclasses.replace(same, ok=False, rounding=0.75, expected_rounding=0.01)
    narrow = dataclasses.replace(report.verification, ok=False, routes=(same, rounded), given_dtype="bfloat16")
    page = Report("Rounded", [], verification=narrow).html()
    assert "differs by 0.75 in bfloat16." in page and heads(page)["Gradient"][2] == "differs by 0.75"
    for order in ([math.nan, 0.5, math.inf], [math.inf, 0.5, math.nan]):
        assert f"The worst, route {[math.isnan(each) for each in order].index(True)}, is not finite" in alarm(*order)


def test_the_noise_scale_is_compared_with_the_batch_in_its_own_units():
    """A loss over tokens has a noise scale in tokens; its batch has 64 examples, and 640 tokens."""
    noise = ab.NoiseScale(trace_sum=1280.0, gradient_square_sum=2.0, steps=2.0, units=1280.0, microbatches=8.0)
    page = Report("Tokens", rows(9), noise=noise, settings={"batch_size": 64}).html()
    assert "is 640; a step has 640 units. To first order, a step makes 50% of" in page
    assert ">batch 640</text>" in page and ">batch 64</text>" not in page


def test_a_long_history_stays_small_and_keeps_its_spike():
    history = rows(100_000)
    history[54_321]["loss"] = 77.0
    page = Report("Long", history, environment={}).html()
    assert len(page) < 250_000
    assert "highest 77 at step 54,322" in page
    series = thinned(column(history, "loss"))
    assert len(series) <= 1002 and series.values.max() == 77.0
    assert series.values.min() == min(row["loss"] for row in history)
    strided = column(history[::100], "loss")  # the control: the spike is not in every hundredth row
    assert strided.values.max() < 10


def test_values_that_are_not_numbers_leave_gaps():
    history = [{"step": step, "loss": float(step)} for step in range(1, 11)]
    for place, value in ((2, None), (3, math.nan), (5, math.inf), (7, "lost"), (8, 10**400)):
        history[place]["loss"] = value
    path = re.search(r'<path class="curve blue" d="([^"]*)"', Report("Gaps", history).html())[1]
    assert path.count("M") == 4 and path.count("L") == 1 and path.count("h0") == 3  # 1-2, 5, 7, 10
    assert "nan" not in path and "inf" not in path
    assert "5 of 10 rows have no finite value here." in Report("Gaps", history).html()
    control = Report("No gaps", [{"step": step, "loss": float(step)} for step in range(1, 11)]).html()
    assert re.search(r'<path class="curve blue" d="([^"]*)"', control)[1].count("M") == 1


@pytest.mark.parametrize("unknown", [math.nan, None], ids=str)
def test_a_missing_rate_at_the_first_step_is_not_a_gap(unknown):
    history = [{"step": step, "loss": 1.0, "examples_per_second": 900.0 + step} for step in range(1, 11)]
    history[0]["examples_per_second"] = unknown
    page = Report("First", history).html()
    assert "no finite value" not in page and "not finite" not in page
    history[5]["examples_per_second"] = unknown  # the control: in the middle it is a gap
    assert "1 of 9 rows has no finite value here." in Report("Midst", history).html()


def test_the_legend_names_every_curve_and_a_note_the_columns_not_drawn():
    def legend(page):
        return re.findall(r'<li><svg[^>]*><\w+ class="\w+ ([^"]*)"[^>]*></svg>(.*?)</li>', page.replace("/>", ">"))

    history = [{"step": step, "loss": 1 / step, "eval.loss": 2 / step} for step in range(1, 11)]
    assert legend(Report("Few", history).html()) == [("blue", "training loss"), ("orange disc", "eval.loss")]
    assert "in the log" not in Report("Few", history).html()
    many = {f"eval.{place}.loss": float(place) for place in range(14)} | {f"aux.{place}": 1.0 for place in range(18)}
    page = Report("Many", [{"step": step, "loss": 1 / step} | many for step in (1, 2, 3)]).html()
    styles, names = zip(*legend(page)[:13], strict=True)
    assert names == ("training loss", *list(many)[:12]) and len(set(styles)) == 13
    assert "8 more columns are in the log: eval.12.loss, eval.13.loss, aux.12, " in page and "aux.17." in page
    assert page.count('data-figure="aux.') == 12


def test_large_numbers_read_the_same_everywhere():
    history = [{"step": 1, "loss": 2.5e-120}, {"step": 2, "loss": 2.5e120}]
    page = Report("Large", history).html()
    assert heads(page)["Loss"] == ("", "2.5\u00d710¹²⁰", "from 2.5\u00d710⁻¹²⁰ at step 1")
    assert "highest 2.5\u00d710¹²⁰ at step 2" in page


def test_characters_that_change_the_direction_of_writing_are_shown_as_codes():
    turns = [chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))]
    history = [{"step": step, "loss": 1.0, f"aux.{''.join(turns)}": 1.0 * step} for step in (1, 2)]
    page = Report("".join(turns), history, samples=[("".join(turns), "".join(turns))]).html()
    assert not any(turn in page for turn in turns)
    codes = "".join(f"\\u{ord(turn):04x}" for turn in turns)
    assert f"<title>{codes}</title>" in page and f"<h3>{codes}</h3><pre>{codes}</pre>" in page
    assert "<h1>\u0633\u0644\u0627\u0645</h1>" in Report("\u0633\u0644\u0627\u0645", []).html()  # letters stay


@pytest.mark.parametrize(
    "losses",
    [
        [1.0, 1.0, 1.0],
        [0.0, 0.0],
        [-1e308, 1e308],
        [1e-300, 1e300],
        [5e-324, 1.0],
        [1.0, 1.0 + 1e-15],
        [-3.0, -2.0],
        [np.float32(2), jnp.float32(1), True],
        [math.nan, math.nan],
        [1e15, 1e15 + 1],
    ],
    ids=str,
)
def test_odd_numbers_are_drawn(losses):
    page = Report("Odd", [{"step": step, "loss": loss} for step, loss in enumerate(losses)]).html()
    drawn = re.findall(r'(?:\bd|\bx|\by|viewBox)="([^"]*)"', page)
    assert not any("nan" in place or "inf" in place for place in drawn)


def test_smoothing_has_no_lag_and_less_noise():
    steps = np.arange(1000.0)
    line = smoothed(Series(steps, 3 - steps / 500)).values
    np.testing.assert_allclose(line[:900], 3 - steps[:900] / 500, rtol=1e-9)
    noise = np.random.default_rng(0).normal(size=1000)
    assert smoothed(Series(steps, noise)).values[100:900].std() < 0.25 * noise.std()


@pytest.mark.parametrize("length", [100, 200_000])
def test_the_smoothed_curve_starts_at_the_first_value_and_follows_steep_rows(length):
    steps = np.arange(1.0, length + 1)
    rows = Series(steps, 1 / steps)
    smooth = smoothed(rows)
    assert smooth.values[0] == rows.values[0]
    assert np.max(smooth.values * steps) < 1.15  # with windows back to the first value it would be 1.7 and 25
    # The drawn curve has straight lines between some of its points.
    drawn = thinned(smooth, 333)
    between = np.exp(np.interp(steps, drawn.steps, np.log(drawn.values)))
    assert np.max(between * steps) < 1.25
    coarse = np.linspace(0, length - 1, 166).astype(int)  # the control: evenly apart
    line = np.exp(np.interp(steps, steps[coarse], np.log(smooth.values[coarse])))
    assert length == 100 or np.max(line * steps) > 10


def test_the_same_report_is_the_same_page(report):
    assert report.html() == report.html()


def luminance(color):
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    """The contrast ratio of WCAG 2."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_every_colour_has_enough_contrast_on_every_background():
    page = Report("Colours", []).html()
    schemes = [dict(re.findall(r"--(\w+): (#\w{6});", block)) for block in re.findall(r":root \{(.*?)\}", page, re.S)]
    assert len(schemes) == 3  # light, dark, printed
    for scheme in schemes:
        for ink in ("text", "muted", "blue", "orange", "green", "purple", "red"):
            for ground in ("page", "panel"):
                assert contrast(scheme[ink], scheme[ground]) >= 4.5, (ink, ground)
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#888888", "#ffffff") < 4.5  # the control


# --- the file -------------------------------------------------------------------------------------------------------


def test_write_is_all_or_nothing(tmp_path):
    path = tmp_path / "report.html"
    assert Report("First", []).write(str(path)) == path
    first = path.read_text("utf-8")
    with pytest.raises(TypeError):
        Report("Second", [], samples=[("no text", None)]).write(path)
    assert path.read_text("utf-8") == first
    Report("Third, with half a character \ud800", []).write(path)
    assert "<h1>Third" in path.read_text("utf-8")
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_a_coupled_loss_is_described_in_the_words_of_the_reading():
    def loss(w, x):
        return jnp.mean((x @ w) ** 2) + jax.lax.stop_gradient(jnp.max(x @ w))

    reading = ab.read(loss, jnp.ones(3), jnp.ones((4, 3)))
    page = Report("Coupled", [], reading=reading).html()
    assert f"<strong>Couples examples</strong>: {reading.how}." in page and "one pass" not in page


def test_write_expands_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Report("Home", []).write("~/report.html") == tmp_path / "report.html"
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_an_unwritable_path_is_named(tmp_path):
    report = Report("A run", [], samples=[("never drawn", None)])
    with pytest.raises(ab.InputError, match=r"in a folder that exists, got path=.*missing/report\.html") as error:
        report.write(tmp_path / "missing" / "report.html")
    assert f'mkdir -p "{tmp_path}/missing"' in str(error.value)
    with pytest.raises(ab.InputError, match="needs the name of a file"):
        report.write(tmp_path)
    with pytest.raises(ab.InputError, match=r"a folder that is writable, got path=.*too long"):
        report.write(tmp_path / ("r" * 300))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"Call me Ishmael.",
        b"<!DOCTYPE html><title>A page of somebody else</title>",
        b'How to tell: <meta name="generator" content="anybatch 0.7.0">',
        b'<!doctype html><meta charset="utf-8"><meta name="generator" content="anybatch explain 0.7.0">',
        b"\xff\x00" * 10**6,
    ],
    ids=["text", "page", "quotation", "plan", "bytes"],
)
@pytest.mark.parametrize("way", ["file", "symlink"])
def test_a_file_that_is_not_a_report_is_not_replaced(tmp_path, content, way):
    (tmp_path / "book.txt").write_bytes(content)
    (tmp_path / "link.html").symlink_to("book.txt")
    path = tmp_path / ("book.txt" if way == "file" else "link.html")
    with pytest.raises(ab.InputError) as caught:
        Report("A run", [], samples=[("never drawn", None)]).write(path)
    assert str(caught.value) == (
        f"A report replaces no file but a report of anybatch, got path='{path}', which is something else.\n"
        f"Name another file, or first: mv {path} {path}.kept"
    )
    assert (tmp_path / "book.txt").read_bytes() == content and (tmp_path / "link.html").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_reports_and_empty_files_are_replaced(tmp_path):
    """The control. A link to a report stays a link."""
    path, link = tmp_path / "report.html", tmp_path / "link.html"
    path.touch()
    link.symlink_to("report.html")
    for title, target in [("First", path), ("Second", path), ("Third", link)]:
        assert Report(title, []).write(target) == target
        assert f"<h1>{title}" in path.read_text("utf-8")
    assert link.is_symlink()


@pytest.mark.parametrize("special", ["fifo", "device"])
def test_pipes_and_devices_are_not_replaced(tmp_path, special):
    path = tmp_path / "report.html"
    if special == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null")
    with pytest.raises(ab.InputError, match="replaces no file but a report of anybatch"):
        Report("A run", []).write(path)
    assert not path.is_file()


def test_an_interrupted_write_leaves_the_earlier_page(tmp_path, monkeypatch):
    path = Report("First", []).write(tmp_path / "report.html")
    for error, raised in [
        (OSError(28, "No space left on device"), ab.InputError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ]:

        def fails(*_, error=error):
            raise error

        monkeypatch.setattr(os, "fsync", fails)
        with pytest.raises(raised, match="No space left on device" if raised is ab.InputError else None):
            Report("Second", []).write(path)
        assert "<h1>First" in path.read_text("utf-8") and os.listdir(tmp_path) == ["report.html"]


def test_without_jinja2_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ab.InputError, match=re.escape('pip install ".[cli]"')):
        Report("A run", []).html()


def test_the_environment_can_be_given():
    page = Report("Here", []).html()
    assert ab.__version__ in page and jax.local_devices()[0].device_kind in page
    given = Report("There", [], environment={"Device": "8 x TPU v6"}).html()
    assert "8 x TPU v6" in given and "jaxlib" not in given
