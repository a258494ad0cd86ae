"""How long does a learner wait for the first page of `anybatch learn --web`, and for a verdict in the browser?

    python benchmarks/web.py [--rounds 5]

Starts the server and a Chromium (Debian: `apt-get install chromium`) that opens its address. Then solves the first
exercises in the editor, several times each. A verdict says itself how long the check took; what the browser waits
beyond that is the cost of the page. Takes about a minute. Found on two busy cores: the address after 0.6 s, the first
page after 1.2 s, and 0.1 to 0.2 s beyond the check.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from playwright.sync_api import sync_playwright

from anybatch.learn.catalogue import Course

COMMAND = [sys.executable, "-m", "anybatch", "learn", "--web", "--no-open", "--folder"]
QUIET = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=path, args=QUIET).new_page()
        page.goto("about:blank")
        begin = time.perf_counter()
        server = subprocess.Popen([*COMMAND, folder], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        address = next(line.strip() for line in iter(server.stdout.readline, "") if line.startswith("http"))
        print(f"address printed after {time.perf_counter() - begin:.2f} s")
        page.goto(address)
        page.wait_for_selector("h1")
        print(f"first page shown after {time.perf_counter() - begin:.2f} s")
        for exercise in Course.builtin().exercises[:6]:
            page.goto(f"{address.split('/?')[0]}/exercise/{exercise.name}")
            print(f"{exercise.name:28}", verdicts(page, exercise.solution, rounds))
        server.terminate()
        server.wait()


def verdicts(page, source: str, rounds: int) -> str:
    """The median time of a check, and how much longer it takes until the page shows it."""
    page.wait_for_selector(".cm-content")
    page.locator(".cm-content").click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(source)
    checks, beyond = [], []
    for number in range(rounds + 1):
        time.sleep(0.7)  # nobody runs it faster than that
        begin = time.perf_counter()
        page.keyboard.press("Control+Enter")
        page.wait_for_function("document.querySelector('.ab-verdict')?.innerText.includes('Checking')", polling=5)
        page.wait_for_function("document.querySelector('.ab-seconds') !== null", polling=5)
        waited = time.perf_counter() - begin
        took = float(page.locator(".ab-seconds").inner_text().split()[0])
        if number:  # the first check waits for imports
            checks.append(took)
            beyond.append(waited - took)
    return f"check {statistics.median(checks):.2f} s, page {statistics.median(beyond):.2f} s more"


if __name__ == "__main__":
    main()
