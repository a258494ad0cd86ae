"""What `fit` shows on the standard error: a progress bar in a terminal, lines elsewhere."""

import importlib.util
import math
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from anybatch.errors import InputError

# Seconds between two lines, where there is no bar.
BETWEEN_LINES = 10.0


def display_for(progress: Any, *, is_first: bool) -> "Display":
    """The display for `fit(progress=...)`.

    Args:
      progress: True for a bar in a terminal and lines elsewhere, "bar" or "lines" for one of them, False for nothing.
      is_first: whether this is the first process: the others show nothing.

    Raises:
      InputError: for anything else.
    """
    if progress not in (True, False, "bar", "lines"):
        raise InputError(
            'progress must be True, False, "bar" or "lines"',
            given=f"progress={progress!r}",
            remedy='For example progress="lines".',
        )
    if progress is False or not is_first:
        return Display()
    has_rich = importlib.util.find_spec("rich") is not None
    if progress == "bar" and not has_rich:
        raise InputError("A bar needs rich", given="a Python without it", remedy='pip install "anybatch[train]"')
    is_terminal = hasattr(sys.stderr, "isatty") and sys.stderr.isatty()
    return BarDisplay() if progress == "bar" or (progress is True and has_rich and is_terminal) else LineDisplay()


class Display:
    """A display that shows nothing, and the base of the others."""

    def __enter__(self) -> "Display":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def begin(self, done: int, total: int | None) -> None:
        """Called before the first step, with the number of steps done, and in all if that is known."""

    def show(self, row: Mapping[str, Any], *, is_notable: bool = False) -> None:
        """Shows the row of a step. A notable one, e.g. with an evaluation, is always shown."""

    def say(self, text: str) -> None:
        """Shows a message."""


class LineDisplay(Display):
    """A line for the first step, for notable ones, and every ten seconds."""

    def __init__(self) -> None:
        self._total: int | None = None
        self._last: float | None = None
        self._first: tuple[float, int] | None = None  # the time after the first step, and its number

    def begin(self, done: int, total: int | None) -> None:
        self._total, self._first = total, None

    def show(self, row: Mapping[str, Any], *, is_notable: bool = False) -> None:
        now = time.monotonic()
        self._first = self._first or (now, row["step"])  # the clock starts here: the first step includes compilation
        if self._last is not None and not is_notable and now - self._last < BETWEEN_LINES:
            return
        self._last = now
        total = "" if self._total is None else f"/{self._total}"
        parts = [f"step {row['step']}{total}", summary(row), self._time_left(row["step"], now)]
        self.say("  ".join(filter(None, parts)))

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _time_left(self, step: int, now: float) -> str:
        then, first = self._first or (now, step)
        if self._total is None or step - first < 2 or step >= self._total:
            return ""
        return f"{_clock((now - then) / (step - first) * (self._total - step))} left"


class BarDisplay(Display):
    """A progress bar made with rich: steps, loss, throughput, time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
            expand=True,
        )
        self._task: Any = None

    def __enter__(self) -> "BarDisplay":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, done: int, total: int | None) -> None:
        self._task = self._progress.add_task("Training", completed=done, total=total, text="compiling")

    def show(self, row: Mapping[str, Any], *, is_notable: bool = False) -> None:
        self._progress.update(self._task, completed=row["step"], text=summary(row))

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)


def summary(row: Mapping[str, Any]) -> str:
    """The most important numbers of a row: loss, evaluations, throughput and skipped steps.

    >>> summary({"step": 3, "loss": 1.25, "examples_per_second": 1234.5, "eval.accuracy": 0.9, "skipped": 1})
    'loss 1.25  eval.accuracy 0.9  1,234 examples/s  1 skipped'
    """
    parts = [f"loss {row['loss']:.4g}"] if _is_known(row.get("loss")) else []
    parts += [f"{name} {value:.4g}" for name, value in row.items() if name.split(".")[0] == "eval"]
    rate = next((name for name in ("tokens", "examples") if _is_known(row.get(f"{name}_per_second"))), None)
    if rate:
        parts.append(f"{row[f'{rate}_per_second']:,.0f} {rate}/s")
    if row.get("skipped"):
        parts.append(f"{row['skipped']} skipped")
    return "  ".join(parts)


def _is_known(value: Any) -> bool:
    return isinstance(value, (int, float)) and not math.isnan(value)


def _clock(seconds: float) -> str:
    """A duration as hours, minutes and seconds.

    >>> _clock(3725.2)
    '1:02:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
