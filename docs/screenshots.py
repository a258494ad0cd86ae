"""Takes the screenshots of `anybatch learn --web` that the documentation shows: `python docs/screenshots.py`.

Needs Chromium and the package playwright. Takes about a minute, and writes docs/learn_*.png.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

from PIL import Image
from playwright.sync_api import expect, sync_playwright

from anybatch.learn.catalogue import Course

HERE = pathlib.Path(__file__).parent
QUIET = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
COURSE = Course.builtin()
expect.set_options(timeout=60_000)


def write(page, source):
    page.locator(".cm-content").click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(source)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".ab-seconds", timeout=60_000)


def mistake(exercise, name):
    source = next(each.source for each in exercise.mistakes if each.name == name)
    return source[source.index("import jax") :]  # without the docstring, which says how it fails


def open_exercise(page, origin, number):
    exercise = COURSE.find(str(number))
    page.goto(f"{origin}/exercise/{exercise.name}")
    page.wait_for_selector(".cm-content")
    page.wait_for_timeout(800)
    return exercise


def settle(page):
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(700)


def take(page, origin, scheme):
    def shot(name, top=0):
        settle(page)
        page.evaluate(f"window.scrollTo(0, {top})")
        page.wait_for_timeout(200)
        path = HERE / f"learn_{name}_{scheme}.png"
        page.screenshot(path=path)
        Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)  # a third of the bytes

    for number in (1, 2):
        exercise = open_exercise(page, origin, number)
        write(page, exercise.solution)
        expect(page.locator(".ab-verdict-title")).to_have_text("Passed.")
    shot("success", top=430)
    exercise = open_exercise(page, origin, 5)
    write(page, mistake(exercise, "mean_of_microbatches"))
    shot("exercise")
    exercise = open_exercise(page, origin, 6)
    write(page, mistake(exercise, "vmap_over_microbatches"))
    page.wait_for_timeout(1500)
    shot("failure", top=page.locator(".ab-results").bounding_box()["y"] - 120)
    page.goto(origin)
    shot("list")
    page.goto(f"{origin}/playground")
    page.wait_for_timeout(1000)
    playground(page)
    shot("playground")


def playground(page):
    page.get_by_role("combobox").first.click()
    page.get_by_role("option", name="Contrastive, as CLIP").click()
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("heading", name="A small batch, step by step")).to_be_visible()
    expect(page.get_by_role("button", name="Play")).to_be_visible()


def main():
    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=QUIET)
        for scheme in ("light", "dark"):
            with tempfile.TemporaryDirectory() as folder:
                command = [
                    sys.executable,
                    "-m",
                    "anybatch",
                    "learn",
                    "--web",
                    "--no-open",
                    "--folder",
                    "anybatch-learn",
                ]
                server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder)
                address = next(line.strip() for line in iter(server.stdout.readline, "") if line.startswith("http"))
                context = browser.new_context(viewport={"width": 1440, "height": 960}, color_scheme=scheme)
                page = context.new_page()
                page.goto(address)
                take(page, address.split("/?")[0], scheme)
                context.close()
                server.terminate()
                server.wait()
        browser.close()


if __name__ == "__main__":
    main()
