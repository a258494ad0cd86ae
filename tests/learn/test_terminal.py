"""The interactive session: keys, saves, and the state of the terminal afterwards. The grader is a stand-in."""

import io
import os
import pathlib
import shutil
import signal
import time

import pytest
from cases.learn_course import grade, write_course
from cases.learn_terminal import Terminal
from rich.console import Console

from anybatch import InputError
from anybatch.learn.check import Verdict
from anybatch.learn.learner_progress import Progress, Saves
from anybatch.learn.terminal.pages import Screen, shown
from anybatch.learn.terminal.watch import _ESCAPES, KEYS, Checker

SESSION = """
import sys
sys.path.insert(0, {tests!r})
from cases.learn_course import grade
from anybatch.learn.catalogue import Course
from anybatch.learn.terminal.pages import Screen
from anybatch.learn.learner_progress import Progress, Saves
from anybatch.learn.terminal.watch import Checker, Watch
progress = Progress({folder!r}, Course.read({course!r}))
progress.prepare()
watch = Watch(progress, Screen(), Checker(grade), 0)
{more}
sys.exit(watch.run(progress.current))
"""


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    return write_course(tmp_path_factory.mktemp("courses") / "course")


@pytest.fixture
def progress(tmp_path, course):
    return Progress(tmp_path / "desk", course)


@pytest.fixture
def session(progress):
    def begin(more="", through=(), **options):
        places = {"tests": str(pathlib.Path(__file__).parents[1]), "folder": str(progress.folder)}
        program = SESSION.format(course=str(progress.course.folder), more=more, **places)
        return Terminal(*through, "-c", program, **options)

    return begin


def replace(path, text):
    """Replaces a file as editors do: writes another one, and renames it."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    os.replace(beside, path)


def test_a_session(session, progress, course):
    path = progress.path(course.exercises[0])
    with session() as terminal:
        page = terminal.wait("Why it matters", "It is checked whenever you save it", "help")
        assert "Exercise 1 of 3" in page and "0 of 3 solved" in page and path.read_text() == course.exercises[0].starter
        assert terminal.is_raw and "checking" not in page  # a starter is not run
        path.write_text("first try")
        assert terminal.wait("Wrong: first try", "help").index("checking…") < 10
        path.write_text("first try")  # a save that changes nothing
        os.utime(path)
        assert terminal.read(0.3) == ""
        replace(path, "second try")
        terminal.wait("Wrong: second try", "Look again.", "help")
        path.unlink()
        assert terminal.read(0.3) == ""  # gone for a moment
        path.write_text("third try")
        terminal.wait("Wrong: third try", "help")
        path.write_text("slow try")
        terminal.wait("checking…")
        path.write_text("old try")
        time.sleep(0.15)
        path.write_text("new try")  # of the waiting ones, only the newest is checked
        assert "old try" not in terminal.wait("Wrong: slow try", "Wrong: new try", "help")
        assert "Press n again" in terminal.press("n") and "Exercise" not in terminal.press(
            "r", "Wrong: new try", "help"
        )
        for level in (1, 2, 3):
            assert f"Hint {level} of 3" in terminal.press("h")
        assert "Hint 1 of 3" in terminal.press("h", "Hint 3 of 3", "help")
        assert "once you have solved this exercise" in terminal.press("s")
        path.write_text("right")
        solved = terminal.wait("Passed.", "5 cases", "Why this is right", "Now with anybatch", "Solved.", "help")
        assert "Exercise 2" not in solved + terminal.read(0.3)  # it never moves on by itself
        assert "A solution of 1" in terminal.press("s") and "x reset the file" in terminal.press("?")
        assert "Nothing was changed" in terminal.press("x", "y to confirm", "help") + terminal.press("q")
        terminal.press("\x1b[C\x1bOPzn", "Exercise 2 of 3", "1 of 3 solved", "help")  # arrows and others are ignored
        terminal.press("n", "Press n again", "help")
        terminal.press("n", "Exercise 3 of 3", "help")
        terminal.press("b", "Exercise 2 of 3", "help")
        assert "solved" in terminal.press("l", "The gradient of a mean", "Third", "help")
        assert "Your progress is kept. To continue: anybatch learn" in terminal.press("q", "kept")
        assert terminal.end() == 0 and terminal.before == _attributes(terminal)
    assert progress.current.name == "second" and set(progress.solved) == {"mean_gradient"}
    assert progress.hints_seen(course.exercises[0]) == 3


def _attributes(terminal):
    import termios

    return termios.tcgetattr(terminal.slave)


def test_it_goes_on_where_it_was_left_and_runs_nothing_twice(session, progress, course):
    progress.prepare()
    first, second, third = course.exercises
    for exercise in (first, third):
        progress.path(exercise).write_text("right")
        progress.solve(exercise, "right", 0.1)
    progress.path(second).write_text("begun")
    progress.go_to(third)
    with session(columns=60) as terminal:
        assert "checking" not in terminal.wait("Exercise 3 of 3", "You solved it on", "help") + terminal.read(0.3)
        assert "Still open: 2 (Second)" in terminal.press("n", "The end of the course", "help")
        assert all("That was the last exercise" in terminal.press(key) for key in "nr")
        terminal.press("b", "Exercise 3 of 3", "help")
        terminal.press("b", "Exercise 2 of 3", "Wrong: begun", "help")  # a started file is checked
        progress.path(second).write_text("right as well")
        terminal.wait("Solved.", "help")
        terminal.press("n", "Exercise 3 of 3", "help")
        assert "You have solved all 3 exercises" in terminal.press("n", "The end of the course", "ab.grad", "help")
        terminal.press("b", "Exercise 3 of 3", "help")
        terminal.press("x", "y to confirm", "help")
        kept = progress.path(third).with_name("03_third.py.bak1")
        terminal.press("y", "Exercise 3 of 3", "Your file is now", "help")
        assert kept.read_text() == "right" and progress.path(third).read_text() == third.starter
        terminal.press("q", "kept")
        assert terminal.end() == 0
    assert set(progress.solved) == {"mean_gradient", "second"}


@pytest.mark.full
def test_what_goes_wrong_is_shown_and_it_goes_on(session, progress, course):
    path = progress.path(course.exercises[0])
    with session() as terminal:
        terminal.wait("help")
        path.write_text("explode")
        terminal.wait("The check itself failed", "RuntimeError: a bug of the grader", "help")
        path.write_bytes(b"\xff\xfe")
        terminal.wait("UTF-8", "byte 0 is 0xff", "help")
        path.unlink()
        terminal.wait("is gone", "help")
        path.write_text("right")
        terminal.wait("Solved.", "help")
        os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
        time.sleep(0.2)
        path.write_text("back")  # an editor that writes slowly: the empty file is not checked
        assert terminal.wait("Wrong: back", "help").count("Wrong") == 1
        path.write_text("")
        terminal.wait("Wrong: ", "help")
        assert terminal.read(0.3) == ""  # it is empty, not gone
        path.unlink()
        path.mkdir()
        terminal.wait("(a folder)", "reset 01_mean_gradient --course", "help")
        assert "Your file is now" in terminal.press("xy", "Your file is now", "help")
        shutil.rmtree(progress.folder)
        terminal.press("nn", "must be writable", "help")
        assert terminal.process.poll() is None


@pytest.mark.parametrize(
    "end, status",
    [
        (lambda terminal: terminal.process.send_signal(signal.SIGTERM), 128 + signal.SIGTERM),
        (lambda terminal: os.write(terminal.master, b"l"), 1),  # which raises; see below
    ],
    ids=["sigterm", "exception"],
)
def test_the_terminal_is_left_as_it_was_found(session, end, status):
    with session("watch.screen.listing = None") as terminal:
        terminal.wait("help")
        assert terminal.is_raw
        end(terminal)
        assert terminal.end() == status
        assert _attributes(terminal) == terminal.before
        assert ("Traceback" in terminal.shown) == (status == 1)


# Acts like a shell whose program is stopped and continued.
SHELL = """
import os, signal, subprocess, sys, termios
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
before = termios.tcgetattr(0)
child = subprocess.Popen([sys.executable, *sys.argv[1:]], process_group=0)
os.tcsetpgrp(0, child.pid)
_, how = os.waitpid(child.pid, os.WUNTRACED)
os.tcsetpgrp(0, os.getpgrp())
print("stopped", os.WIFSTOPPED(how), termios.tcgetattr(0) == before, flush=True)
os.tcsetpgrp(0, child.pid)
os.kill(child.pid, signal.SIGCONT)
sys.exit(child.wait())
"""


def test_the_terminal_is_itself_while_it_is_stopped_and_after_control_c(session):
    with session(through=("-c", SHELL)) as terminal:
        terminal.wait("help")
        terminal.press("\x1a", "stopped True True", "help")  # Ctrl-Z, then continue
        assert terminal.is_raw
        os.write(terminal.master, b"\x03")  # Ctrl-C
        assert terminal.end() == 130 and _attributes(terminal) == terminal.before
        assert "Your progress is kept" in terminal.shown and "Traceback" not in terminal.shown


def test_saves(tmp_path):
    path = tmp_path / "file.py"

    def read():
        if path.read_bytes() == b"\xff":
            raise InputError("It must be UTF-8", given="0xff", remedy="Save it as UTF-8.")
        return path.read_text()

    saves = Saves(path, read)
    assert saves.look() is None and not saves.is_gone
    path.write_text("one")
    assert saves.look() == "one" and saves.look() is None
    replace(path, "one")
    assert saves.look() is None
    replace(path, "two")
    assert saves.look() == "two"
    path.write_text("")
    assert saves.look() is None  # about to be written
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match="UTF-8"):
        saves.look()
    assert saves.look() is None  # reported once


def test_of_the_checks_that_wait_the_newest_is_made(course):
    seen = []

    def slow(exercise, source):
        time.sleep(0.1)
        seen.append(source)
        return grade(exercise, source)

    checker = Checker(slow)
    for source in ("a", "b", "c", "right"):
        checker.submit(course.exercises[0], source)
        time.sleep(0.02)
    results = []
    while checker.is_busy or len(results) < len(seen):
        results += checker.results()
    checker.close()
    assert seen == ["a", "right"] and [result.passed for _, _, result in results] == [False, True]


def test_the_keys_that_are_many_bytes_are_none():
    assert _ESCAPES.sub("", "\x1b[Ah\x1bOP\x1b[3~q\x1b") == "hq"


VERDICT = Verdict(
    "second",
    False,
    stage="value",
    title="You averaged, and [bold]more[/bold].",
    text="expected 1\nyours    2",
    mistake="the mean",
    line=7,
    source_line="    return total / n",
    prints="a\x1b[2Jb\rc\n",
    prints_dropped=1234,
    seconds=0.213,
    done=(("signature", "f(w, x)"),),
)


class Tty(io.TextIOWrapper):
    def isatty(self):
        return True


def drawn(encoding, kind=io.TextIOWrapper):
    file = kind(io.BytesIO(), encoding=encoding, write_through=True)
    screen = Screen(file)
    return screen, lambda: file.buffer.getvalue().decode(encoding)


def test_a_verdict_in_plain_text():
    screen, text = drawn("utf-8")
    screen.verdict(VERDICT)
    assert text().splitlines() == [
        "✗ You averaged, and [bold]more[/bold].  0.21 s",
        "  ✓ signature f(w, x)",
        "  ✗ value     the mean",
        "",
        "  line 7 │ return total / n",
        "",
        "  expected 1",
        "  yours    2",
        "",
        "  your prints",
        "  │ a\\x1b[2Jb",
        "  │ c",
        "  1,234 more bytes were printed and are not shown.",
    ]


def test_everything_plain_has_no_escapes_and_no_boxes(progress, course):
    screen, text = drawn("utf-8")
    exercise = course.exercises[0]
    everything(screen, exercise, course, progress)
    assert exercise.page.strip() in text() and "\x1b" not in text() and not set("┏━┃─█") & set(text())


def everything(screen, exercise, course, progress):
    screen.page(exercise, progress)
    screen.verdict(VERDICT)
    screen.solved(exercise)
    screen.hint(exercise, 3)
    screen.listing(progress, exercise)
    screen.closing(progress)
    screen.solution(exercise)
    screen.help(KEYS)


@pytest.mark.parametrize("kind", [io.TextIOWrapper, Tty])
def test_an_encoding_that_has_no_marks_does_without(progress, course, kind, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    screen, text = drawn("ascii", kind)
    everything(screen, course.exercises[0], course, progress)
    screen.say("½ → ×² é 你")  # noqa: RUF001
    assert "! You averaged" in text() and "(w x)^2" in text() and "1/2 -> x^2 e ?" in text().replace("1?2", "1/2")


def test_no_color_is_respected(progress, course, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    colours = []
    for value in ("", "1"):
        monkeypatch.setenv("NO_COLOR", value)
        screen, text = drawn("utf-8", Tty)
        everything(screen, course.exercises[0], course, progress)
        colours.append("\x1b[3" in text() or ";3" in text())
    assert colours == [True, False]


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_nothing_is_wider_than_the_terminal(progress, course, width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    everything(Screen(console=console), course.exercises[0], course, progress)
    lines = console.file.getvalue().splitlines()
    longest = max(len(line.rstrip()) for line in lines if not set(line) <= {"─"})
    assert longest <= min(width, 100)


def test_what_a_learner_prints_cannot_move_the_cursor():
    assert shown("\x07\x1b]0;title\x07\u202e\x85") == "\\x07\\x1b]0;title\\x07\\u202e\\x85"
    assert shown("naïve → ok\n") == "naïve → ok\n"  # the control
