"""The interactive session: each key does one thing, and the file is checked whenever it is saved.

Checks run on a thread, so that keys work meanwhile. The session never moves to another exercise by itself.

**The terminal is restored**, whatever ends the session (a key, Ctrl-C, SIGTERM, an exception), and while it is stopped
by Ctrl-Z.
"""

import concurrent.futures
import contextlib
import datetime
import os
import re
import select
import signal
import termios
import tty
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from anybatch.errors import InputError
from anybatch.learn.catalogue import Exercise
from anybatch.learn.check import Verdict
from anybatch.learn.learner_progress import Progress, Saves
from anybatch.learn.terminal.pages import Screen

_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O.|[^\[O])?")


class Keyboard:
    """Reads keys one by one, without showing them.

    Args:
      file: the descriptor of a terminal.
      on_return: called when the program continues after Ctrl-Z.
    """

    def __init__(self, file: int, on_return: Callable[[], None] = lambda: None) -> None:
        self.file, self.on_return = file, on_return
        self._before: Any = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Keyboard":
        self._before = termios.tcgetattr(self.file)
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, self._end)
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._stop)
        tty.setcbreak(self.file)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def read(self) -> str | None:
        """The keys that were pressed; None if the terminal is closed."""
        try:
            data = os.read(self.file, 1024)
        except OSError:
            return None
        return _ESCAPES.sub("", data.decode("utf-8", "ignore")).lower() if data else None

    def _restore(self) -> None:
        with contextlib.suppress(termios.error):  # the terminal may be closed
            termios.tcsetattr(self.file, termios.TCSANOW, self._before)

    def _end(self, number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    def _stop(self, number: int, _: Any) -> None:
        self._restore()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # The program continues here after SIGCONT.
        signal.signal(signal.SIGTSTP, self._stop)
        tty.setcbreak(self.file)
        self.on_return()


LOOK_EVERY = 0.05  # seconds

KEYS = {
    "n": "next exercise",
    "b": "back to the previous exercise",
    "h": "hint: the next of three",
    "r": "run the check again",
    "l": "list of all exercises",
    "p": "page: show it again",
    "s": "solution, once it is solved",
    "x": "reset the file to the original",
    "q": "quit; your progress is kept",
}
_AT_END = "That was the last exercise. Press b to go back to it, l for the list, q to quit."


class Checker:
    """Runs checks on a thread, one at a time. If several wait, only the newest is run.

    Args:
      grade: takes an exercise and the text of a file, and returns the verdict.
      prepare: called when the learner comes to an exercise, so that its checks are quick.
    """

    def __init__(
        self, grade: Callable[[Exercise, str], Verdict], prepare: Callable[[Exercise], Any] = lambda exercise: None
    ) -> None:
        self._grade, self._prepare = grade, prepare
        self._read, self._write = os.pipe()
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._newest: concurrent.futures.Future[Verdict] | None = None
        self._results: deque[tuple[Exercise, str, Verdict | Exception]] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether a check is running or waiting."""
        return self._newest is not None and not self._newest.done()

    def fileno(self) -> int:
        """A descriptor that becomes readable when there is a verdict."""
        return self._read

    def prepare(self, exercise: Exercise) -> None:
        """Prepares for the checks of an exercise."""
        self._pool.submit(self._prepare, exercise)

    def submit(self, exercise: Exercise, source: str) -> None:
        """Checks a file, once the running check has ended."""
        if self._newest is not None:
            self._newest.cancel()
        self._newest = self._pool.submit(self._grade, exercise, source)
        self._newest.add_done_callback(lambda done: self._done(exercise, source, done))

    def results(self) -> Iterator[tuple[Exercise, str, Verdict | Exception]]:
        """Yields the results since the last call."""
        if select.select([self._read], [], [], 0)[0]:
            os.read(self._read, 1024)
        while self._results:
            yield self._results.popleft()

    def close(self) -> None:
        """Starts no more checks. A running one ends with its process."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _done(self, exercise: Exercise, source: str, done: concurrent.futures.Future[Verdict]) -> None:
        if not done.cancelled():
            error = done.exception()
            self._results.append((exercise, source, error if isinstance(error, Exception) else done.result()))
            os.write(self._write, b".")


class Watch:
    """One interactive session.

    Args:
      progress: the learner's progress and files.
      screen: the output.
      checker: runs the checks.
      keyboard: the descriptor of the terminal.
    """

    def __init__(self, progress: Progress, screen: Screen, checker: Checker, keyboard: int) -> None:
        self.course, self.progress, self.screen, self.checker = progress.course, progress, screen, checker
        self.keyboard = Keyboard(keyboard, on_return=self._keys)
        self.exercise = progress.current
        self.saves: Saves  # since the first `_arrive`
        self.question = ""  # the previous key, if it needs another one as confirmation
        self.is_over = self.is_at_end = self.was_gone = False

    def run(self, exercise: Exercise) -> int:
        """Runs the session until the learner quits. Returns the exit status."""
        try:
            with self.keyboard:
                self._arrive(exercise)
                while not self.is_over:
                    select.select([self.keyboard.file, self.checker.fileno()], [], [], LOOK_EVERY)
                    self._turn()
            status = 0
        except KeyboardInterrupt:
            status = 130
        finally:
            self.checker.close()
        self.screen.erase()
        self.screen.say(f"Your progress is kept. To continue: {self.progress.command()}")
        return status

    def _turn(self) -> None:
        """Handles the keys, verdicts and saves since the last call."""
        if select.select([self.keyboard.file], [], [], 0)[0]:
            keys = self.keyboard.read()
            self.is_over |= keys is None
            for key in keys or "":
                self._press(key)
        for exercise, source, result in self.checker.results():
            self._found(exercise, source, result)
        if not self.is_at_end and not self.is_over:
            self._look()

    def _look(self) -> None:
        try:
            source = self.saves.look()
        except InputError as error:
            return self._say(str(error), "red")
        if source is not None:
            self.was_gone = False
            self._check(source)
        elif self.saves.is_gone and not self.was_gone:
            self.was_gone = True
            self._say(f"{self.saves.path} is gone. Press x to put the original back.", "yellow")

    def _check(self, source: str) -> None:
        was_busy = self.checker.is_busy
        self.checker.submit(self.exercise, source)
        if not was_busy:
            self.screen.checking()
            self.screen.flush()

    def _found(self, exercise: Exercise, source: str, result: Verdict | Exception) -> None:
        is_new = exercise.name not in self.progress.solved
        if isinstance(result, Verdict) and result.passed:
            self.progress.solve(exercise, source, result.seconds)
        if exercise is not self.exercise or self.is_at_end:
            return

        def show() -> None:
            self.screen.time(f"{exercise.file_name}, {datetime.datetime.now():%H:%M:%S}")
            if isinstance(result, InputError):
                self.screen.say(str(result), "red")
            elif isinstance(result, Exception):
                about = f"{type(result).__name__}: {result}"
                self.screen.say(f"The check itself failed. That is not your mistake.\n{about}", "red")
            else:
                self.screen.verdict(result)
                if result.passed:
                    self.screen.solved(exercise)
                    self.screen.heading("Solved." if is_new else "Solved again.")
                    self.screen.say("Press s to compare with a solution, n for the next exercise.")

        self._tell(show)

    def _tell(self, show: Callable[[], None]) -> None:
        """Shows something, and the keys below it."""
        self.screen.erase()
        show()
        self._keys()

    def _say(self, text: str, style: str = "") -> None:
        self._tell(lambda: self.screen.say(f"\n{text}", style))

    def _keys(self) -> None:
        here, reset = ("b back", "") if self.is_at_end else ("n next   h hint   r run", "x reset   ")
        self.screen.keys(f"{here}   l list   {reset}q quit   ? help")
        if self.checker.is_busy:
            self.screen.checking()
        self.screen.flush()

    def _arrive(self, exercise: Exercise) -> None:
        self.progress.place(exercise)  # first, since it may raise
        self.exercise, self.is_at_end, self.was_gone = exercise, False, False
        self.checker.prepare(exercise)
        self.progress.go_to(exercise)
        self.saves = Saves(self.progress.path(exercise), lambda: self.progress.read(exercise))
        state, source = self.progress.state(exercise), None
        with contextlib.suppress(InputError):
            source = self.saves.look()
        self._page()
        if state == "begun" and source is not None:
            self._check(source)

    def _page(self) -> None:
        solved = self.progress.solved.get(self.exercise.name)

        def show() -> None:
            self.screen.page(self.exercise, self.progress)
            self.screen.file(self.saves.path)
            if solved is not None:
                note = f"You solved it on {solved.when[:10]}. Save a change, or press r, to check it again."
                self.screen.say(note, "green")

        self._tell(show)

    def _press(self, key: str) -> None:
        try:
            self._do(key)
        except InputError as error:  # for example a full disk; the session continues
            self._say(str(error), "red")

    def _do(self, key: str) -> None:
        question, self.question = self.question, ""
        if question == "x":
            self._reset() if key == "y" else self._say("Nothing was changed.")
            return
        actions = {
            "n": lambda: self._next(is_sure=question == "n"),
            "b": self._back,
            "h": self._hint,
            "r": lambda: self._check(self.progress.read(self.exercise)),
            "l": self._list,
            "p": self._page,
            "s": self._solution,
            "x": self._ask_to_reset,
            "q": self._quit,
            "?": lambda: self._tell(lambda: self.screen.help(KEYS)),
        }
        if self.is_at_end and key in "hrpsx":
            self._say(_AT_END)
        elif key in actions:
            actions[key]()

    def _next(self, is_sure: bool) -> None:
        if self.is_at_end:
            return self._say(_AT_END)
        if self.exercise.name not in self.progress.solved and not is_sure:
            self.question = "n"
            return self._say("Not solved yet. Press n again to skip it.", "yellow")
        following = self.course.after(self.exercise)
        if following is not None:
            return self._arrive(following)
        self.is_at_end = True
        self._tell(lambda: self.screen.closing(self.progress))

    def _list(self) -> None:
        def show() -> None:
            self.screen.say()
            self.screen.listing(self.progress, self.exercise)

        self._tell(show)

    def _back(self) -> None:
        before = self.exercise if self.is_at_end else self.course.before(self.exercise)
        if before is None:
            return self._say("This is the first exercise.")
        self._arrive(before)

    def _hint(self) -> None:
        levels = self.progress.next_hints(self.exercise)

        def show() -> None:
            for level in levels:
                self.screen.hint(self.exercise, level)

        self.progress.see_hint(self.exercise, max(levels))
        self._tell(show)

    def _solution(self) -> None:
        if self.exercise.name in self.progress.solved:
            self._tell(lambda: self.screen.solution(self.exercise))
        else:
            way = self.progress.command("solution", str(self.exercise.number), "--anyway")
            self._say(f"The solution is shown once you have solved this exercise. To see it anyway: {way}", "yellow")

    def _ask_to_reset(self) -> None:
        self.question = "x"
        text = f"Reset {self.saves.path} to the original? Your file is kept under another name. Press y to confirm."
        self._say(text, "yellow")

    def _reset(self) -> None:
        kept = self.progress.reset(self.exercise)
        self._arrive(self.exercise)
        if kept is not None:
            self._say(f"Your file is now {kept}.")

    def _quit(self) -> None:
        self.is_over = True
