"""`anybatch learn --web` as a learner uses it: in a real browser, with the real checks."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import urllib.parse

import pytest

from anybatch.learn.catalogue import Course

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
expect.set_options(timeout=30_000)

FIRST, SECOND = Course.builtin().exercises[:2]
WRONG = next(mistake for mistake in FIRST.mistakes if mistake.name == "mean_for_sum")
QUIET = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        assert not os.environ.get("CI"), "CI needs Chromium: the pages are looked at in a browser"
        pytest.skip("no Chromium on PATH")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*QUIET, "--disable-component-update"])
        yield browser
        browser.close()


class Site:
    """A running server, and the learner's folder."""

    def __init__(self, browser, folder):
        self.browser, self.folder = browser, folder
        command = [sys.executable, "-m", "anybatch", "learn", "--web", "--no-open", "--folder", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines = iter(self.process.stdout.readline, "")
        self.address = next(line.strip() for line in lines if line.startswith("http://"))

    @property
    def origin(self):
        parts = urllib.parse.urlsplit(self.address)
        return f"{parts.scheme}://{parts.netloc}"

    def file(self, exercise):
        return self.folder / exercise.file_name

    @contextlib.contextmanager
    def pages(self, number=1, path="/", width=1440, **options):
        """Several tabs of one browser, at a page. Errors in the console fail the test."""
        context = self.browser.new_context(viewport={"width": width, "height": 900}, **options)
        errors, tabs = [], []
        for _ in range(number):
            tab = context.new_page()
            tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            tab.on("pageerror", lambda error: errors.append(str(error)))
            if not tabs:
                tab.goto(self.address)
            tab.goto(self.origin + path)
            tabs.append(tab)
        yield tabs
        context.close()
        assert not errors

    @contextlib.contextmanager
    def page(self, path="/", **options):
        with self.pages(1, path, **options) as (page,):
            yield page

    def close(self):
        self.process.terminate()
        self.process.wait(20)
        self.process.stdout.close()


@pytest.fixture
def site(browser, tmp_path):
    site = Site(browser, tmp_path / "mine")
    yield site
    site.close()


@pytest.fixture(scope="module")
def unchanged(browser, tmp_path_factory):
    """A site for tests that only look."""
    site = Site(browser, tmp_path_factory.mktemp("learner") / "mine")
    yield site
    site.close()


def path_of(exercise):
    return f"/exercise/{exercise.name}"


def write(page, source):
    """Types a text into the editor, in place of what is there."""
    page.locator(".cm-content").click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(source)


def written(page):
    return page.locator(".cm-content").inner_text().replace("\u200b", "")


def results(page):
    return page.get_by_role("region", name="Results")


def test_a_learner_reads_fails_repairs_and_goes_on(site):
    with site.page() as page:
        page.get_by_role("link", name=FIRST.title).click()
        expect(page.get_by_role("heading", name="Why it matters")).to_be_visible()
        write(page, WRONG.source)
        page.keyboard.press("Control+Enter")
        expect(results(page)).to_contain_text(WRONG.says)
        expect(results(page).locator(".ab-stage-bad")).to_contain_text("Value")
        expect(page.get_by_role("region", name="The solution")).to_have_count(0)
        write(page, FIRST.solution)
        page.get_by_role("button", name="Run").click()
        expect(results(page)).to_contain_text("Passed.")
        expect(page.get_by_role("region", name="The solution")).to_contain_text("Why this is right")
        expect(page.locator(".ab-solved-count")).to_have_text("1 of 16 solved")
        page.get_by_role("link", name="Next").click()
        expect(page.get_by_role("heading", name=SECOND.title)).to_be_visible()
        page.get_by_role("link", name="Exercises", exact=True).click()
        expect(page.get_by_role("link", name=f"1 {FIRST.title}")).to_contain_text("solved")
    assert site.file(FIRST).read_text().strip() == FIRST.solution.strip()


@pytest.mark.full
def test_a_reload_keeps_the_draft_the_results_and_the_hints(site):
    with site.page(path_of(FIRST)) as page:
        write(page, WRONG.source)
        page.keyboard.press("Control+Enter")
        expect(results(page)).to_contain_text(WRONG.says)
        page.get_by_role("button", name="Show a hint").click()
        expect(page.get_by_text("Hint 1 of 3")).to_be_visible()
        page.reload()
        expect(results(page)).to_contain_text(WRONG.says)
        expect(page.get_by_text("Hint 1 of 3")).to_be_visible()
        assert "so it was written here" in written(page)


@pytest.mark.full
def test_what_is_typed_in_one_tab_appears_in_the_other(site):
    with site.pages(2, path_of(FIRST)) as (one, other):
        write(one, "x = 1  # from one tab")
        expect(other.locator(".cm-content")).to_contain_text("from one tab")
        assert site.file(FIRST).read_text() == "x = 1  # from one tab"


@pytest.mark.full
def test_two_tabs_that_type_at_once_lose_nothing(site):
    with site.pages(2, path_of(FIRST)) as (one, other):
        other.locator(".cm-content").click()
        other.context.set_offline(True)  # for both tabs: each types without knowing of the other
        for page, words in ((one, "from one tab"), (other, "from the other tab")):
            page.locator(".cm-content").click()
            page.keyboard.press("Control+A")
            page.keyboard.insert_text(words)
        other.context.set_offline(False)
        asked = [page for page in (one, other) if _is_asked(page)]
        if asked:
            asked[0].get_by_role("button", name="Keep mine").click()
            expect(asked[0].get_by_role("alert")).to_be_hidden()
    kept = "".join(
        path.read_text() for path in site.folder.glob("*") if path.is_file() and not path.name.startswith(".")
    )
    assert "from one tab" in kept and "from the other tab" in kept


def _is_asked(page):
    with contextlib.suppress(sync_api.TimeoutError):
        page.get_by_role("alert").wait_for(timeout=1500)
        return True
    return False


@pytest.mark.full
def test_a_file_that_changes_on_disk_is_shown_and_checked(site):
    with site.page(path_of(FIRST)) as page:
        expect(page.locator(".cm-content")).to_contain_text("NotImplementedError")
        site.file(FIRST).write_text(FIRST.solution)
        expect(page.locator(".cm-content")).to_contain_text("sum_of_gradients")
        expect(results(page)).to_contain_text("Passed.")


@pytest.mark.full
def test_a_reset_asks_first_and_keeps_the_file(site):
    with site.page(path_of(FIRST)) as page:
        write(page, "x = 1")
        page.get_by_role("button", name="Reset").click()
        page.get_by_role("button", name="Keep my file").click()
        expect(page.locator(".cm-content")).to_contain_text("x = 1")
        page.get_by_role("button", name="Reset").click()
        page.get_by_role("button", name="Put the original back").click()
        expect(page.locator(".cm-content")).to_contain_text("NotImplementedError")
    assert site.file(FIRST).read_text() == FIRST.starter
    assert (site.folder / f"{FIRST.file_name}.bak1").read_text() == "x = 1"


@pytest.mark.full
def test_an_endless_loop_is_stopped_and_said_so(site):
    with site.page(path_of(FIRST)) as page:
        write(
            page,
            FIRST.starter.replace(
                "    raise NotImplementedError", "    while True: pass\n    raise NotImplementedError"
            ),
        )
        page.keyboard.press("Control+Enter")
        expect(results(page)).to_contain_text("Checking")
        page.get_by_role("button", name="Show a hint").click()  # the page works meanwhile
        expect(page.get_by_text("Hint 1 of 3")).to_be_visible(timeout=3000)
        expect(results(page)).to_contain_text(re.compile("10 seconds.*stopped|stopped.*10 seconds"))


@pytest.mark.full
def test_the_playground_draws_a_coupled_loss(unchanged):
    with unchanged.page("/playground") as page:
        page.get_by_role("combobox").first.click()
        page.get_by_role("option", name="Contrastive, as CLIP").click()
        page.get_by_role("button", name="Run").click()
        expect(page.get_by_text("couples examples").first).to_be_visible()
        expect(page.locator(".cm-line", has_text="logits = 10")).to_contain_text("couples")
        expect(page.locator(".cm-line", has_text="hidden =")).to_contain_text("per example")
        expect(page.get_by_text("All routes give the gradient of the full batch.")).to_be_visible()
        sentence = page.locator("p", has_text="the largest that fits").first
        before = sentence.inner_text()
        page.get_by_role("slider").focus()
        page.keyboard.press("End")
        expect(page.get_by_text(before)).to_have_count(0)
        page.get_by_role("button", name="Step").click()
        expect(page.get_by_text("1 of 10.")).to_be_visible()


@pytest.mark.full
def test_a_loss_that_fails_in_the_playground_names_its_line(unchanged):
    with unchanged.page("/playground") as page:
        write(page, "import numpy\n\nparams = batch = numpy.ones(4)\n\ndef loss(params, batch): return nothing\n")
        page.keyboard.press("Control+Enter")
        expect(page.get_by_role("alert")).to_contain_text("name 'nothing' is not defined")
        expect(page.get_by_role("alert")).to_contain_text("Line 5")


@pytest.mark.full
def test_the_placement_says_where_to_start(unchanged):
    course = Course.builtin()
    with unchanged.page() as page:
        page.get_by_role("button", name="Where should I start?").click()
        for number, question in enumerate(course.placement, 1):
            expect(page.get_by_role("heading", name=f"Question {number}")).to_be_visible()
            page.locator(".ab-answer").nth(question.right).click()
        expect(page.get_by_role("dialog")).to_contain_text(f"exercise {course.find(course.placement_end).number}:")
        page.get_by_role("button", name="Close").click()
        page.get_by_role("button", name="Where should I start?").click()
        page.get_by_role("button", name="I do not know").click()
        expect(page.get_by_role("dialog")).to_contain_text(f"exercise {course.find(course.placement[0].start).number}:")


@pytest.mark.parametrize("path", ["/", path_of(Course.builtin().exercises[4]), "/playground"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_usable_on_a_narrow_screen(unchanged, path, scheme):
    with unchanged.page(path, width=360, color_scheme=scheme) as page:
        expect(page.get_by_role("main")).to_be_visible()
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (colour == "rgb(18, 22, 29)") == (scheme == "dark")


@pytest.mark.parametrize("path", ["/", path_of(FIRST), "/playground"])
def test_everything_has_a_name_and_can_be_reached_by_keyboard(unchanged, path):
    with unchanged.page(path) as page:
        page.wait_for_load_state("networkidle")
        unnamed = page.evaluate(UNNAMED)
        assert unnamed == []
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.innerText") == "Skip to the content"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.className").startswith("ab-main")


UNNAMED = """() => [...document.querySelectorAll("button, a, input, [role=textbox], [role=slider], svg[role=img]")]
    .filter(each => each.offsetParent !== null || each.tagName === "svg")
    .filter(each => !(each.getAttribute("aria-label") || each.innerText || each.title || each.closest("label")
        || each.getAttribute("aria-labelledby") || each.querySelector("title")))
    .map(each => each.outerHTML.slice(0, 200))"""


def test_an_address_without_the_token_is_refused(unchanged):
    context = unchanged.browser.new_context()
    page = context.new_page()
    assert page.goto(unchanged.origin + path_of(FIRST)).status == 401
    context.close()
    with unchanged.page() as page:  # the control: with the token, the same address is answered
        assert page.goto(unchanged.origin + path_of(FIRST)).status == 200
        assert "token" not in page.url


def test_an_unknown_exercise_is_a_page_that_says_so(unchanged):
    with unchanged.browser.new_context() as context:
        page = context.new_page()
        page.goto(unchanged.address)
        assert page.goto(f"{unchanged.origin}/exercise/nothing").status == 404
