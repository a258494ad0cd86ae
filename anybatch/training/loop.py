"""`fit`: a training loop around a step, with data, log, checkpoints, resumption and clean stops.

From the top: `fit` checks its arguments, opens everything and returns a `Fitted`. A `Run` holds the state in between:
it resumes from a checkpoint, takes the steps, writes the log and saves. `StopSignals` lets SIGTERM and Ctrl-C stop a
run between two steps, in all processes after the same step. The progress is a bar in a terminal, and lines elsewhere.
"""

import contextlib
import dataclasses
import datetime
import importlib.util
import itertools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from anybatch.call.checks import whole_number
from anybatch.call.display import html_table, in_notebook, paragraph
from anybatch.call.tables import Column
from anybatch.distributed import gather_json
from anybatch.errors import InputError, install, warn
from anybatch.gradient_noise.noise_scale import NoiseScale
from anybatch.training.arrays import refuse_deleted
from anybatch.training.checkpoints import CheckpointError, Checkpoints
from anybatch.training.log import Log, LogRows, check_log, evaluation_columns, finite_numbers, read_log
from anybatch.training.prefetch import Prefetcher, to_device
from anybatch.training.sources import SourcePosition, check_passes, open_source, start_position
from anybatch.training.state import named_arrays, with_arrays

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_END = object()


class StopSignals:
    """A context in which the first SIGTERM or Ctrl-C is recorded instead of ending the process.

    A second Ctrl-C has its usual effect: it raises `KeyboardInterrupt`. A second SIGTERM is ignored. Python delivers
    signals to the main thread only; in other threads nothing is recorded.

    Args:
      prints: whether to print at once, on the standard error, that the run will stop.
    """

    def __init__(self, *, prints: bool = False) -> None:
        self._prints = prints
        self.received: str | None = None  # the name of the signal that this process received
        self._agreed: str | None = None
        self._handlers: dict[int, Any] = {}  # those from before

    @property
    def agreed(self) -> str | None:
        """The name of a signal that any process received and that all processes know of, or None."""
        return self.received if jax.process_count() == 1 else self._agreed

    def in_lockstep(self, items: Iterator[Any]) -> Iterator[Any]:
        """The items of each process, as long as every process has one and none received a signal.

        All processes must take a step together: one that went ahead would wait for the others forever. So they exchange
        a few bytes before each step.
        """
        while True:
            item = next(items, _END)
            own = 1 + SIGNALS.index(signal.Signals[self.received]) if self.received else 0
            everyone = np.asarray(multihost_utils.process_allgather(np.asarray([own, item is _END], np.int32)))
            signals, ended = everyone.reshape(-1, 2).T
            if signals.any():
                self._agreed = SIGNALS[signals.max() - 1].name
                return
            if ended.any():
                if not ended.all():
                    warn(
                        f"The batches of process {', '.join(map(str, np.flatnonzero(ended)))} have ended, and the "
                        "others have more: the run ends here. Give every process equally many batches, or pass steps= "
                        "and batches that can be iterated over again."
                    )
                return
            yield item
            del item

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not None:  # None: a handler outside of Python, which cannot be restored
                    self._handlers[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
            if self._prints:  # now, since a step may take long; with os.write, since print() is not reentrant
                again = " A second one stops at once." if number == signal.SIGINT else ""
                text = f"\n{self.received}: stopping after this step.{again}\n"
                os.write(2, text.encode())
            return
        if number == signal.SIGTERM:
            return  # a launcher passes on what a scheduler sends to all processes: a second one says nothing new
        handler = self._handlers[number]
        signal.signal(number, handler)
        if callable(handler):
            handler(number, frame)
        elif handler != signal.SIG_IGN:
            os.kill(os.getpid(), number)

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
            outer = getattr(handler, "__self__", None)
            if isinstance(outer, StopSignals) and self.received == signal.Signals(number).name:
                outer.received = outer.received or self.received  # a run inside a run: both stop
        self._handlers.clear()


# Seconds between two lines, where there is no bar.
BETWEEN_LINES = 10.0


def display_for(progress: Any, *, is_first: bool) -> "Display":
    """The display for `fit(progress=...)`. Only the first process shows something."""
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
        raise InputError("A bar needs rich", given="a Python without it", remedy=install("train"))
    is_terminal = hasattr(sys.stderr, "isatty") and sys.stderr.isatty()
    return BarDisplay() if progress == "bar" or (progress is True and has_rich and is_terminal) else LineDisplay()


class Display:
    """A display that shows nothing, and the base of the others."""

    def begin(self, done: int, total: int | None) -> None:
        """Called before the first step, with the number of steps done, and in all if that is known."""

    def show(self, row: Mapping[str, Any], *, is_notable: bool = False) -> None:
        """Shows the row of a step. A notable one, e.g. with an evaluation, is always shown."""

    def say(self, text: str) -> None:
        """Shows a message."""

    def close(self) -> None:
        """Called after the last step."""


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
        then, first = self._first
        done, left = row["step"] - first, 0 if self._total is None else self._total - row["step"]
        parts = [f"step {row['step']}{total}", summary(row)]
        if done >= 2 and left > 0:
            parts.append(f"{datetime.timedelta(seconds=round((now - then) / done * left))} left")
        self.say("  ".join(filter(None, parts)))

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class BarDisplay(Display):
    """A progress bar made with rich: steps, loss, throughput, time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(stderr=True),
            expand=True,
        )
        self._task: Any = None

    def begin(self, done: int, total: int | None) -> None:
        self._progress.start()
        self._task = self._progress.add_task("Training", completed=done, total=total, text="compiling")

    def show(self, row: Mapping[str, Any], *, is_notable: bool = False) -> None:
        self._progress.update(self._task, completed=row["step"], text=summary(row))

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._progress.stop()


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


# The most rows in `Fitted.history`. Of longer runs, every second, fourth, ... row is kept.
MOST_ROWS = 100_000

# Seconds to wait for a batch before checking for a signal.
PATIENCE = 0.2

BETWEEN_CHECKPOINTS = datetime.timedelta(minutes=10)

# With several processes, the first decides when it is time for a checkpoint. The others ask it after so many steps.
STEPS_BETWEEN_QUESTIONS = 10

# Seconds between messages while earlier batches are drawn again.
BETWEEN_MESSAGES = 5.0


@dataclasses.dataclass(frozen=True, repr=False)
class Fitted:
    """A training run that has ended or was stopped. Prints as a summary.

    Args:
      state: the state after the last step.
      steps: the number of steps, including those before a resumption.
      history: the rows of the log, from the first step if the run has a log file.
      stopped_by: "SIGTERM" or "SIGINT" if a signal stopped the run; else None.
      resumed_from: the step of the checkpoint that the run was resumed from; None if there was none.
      noise: the gradient noise, averaged over recent steps, if the step computes it.
      seconds: the duration of the run, including earlier processes.
      examples: the number of examples in the steps since the start, or since the resumption.
      checkpoints: the folder with the checkpoints, if the run has any.
      log: the log file, if this process writes one.
    """

    state: Any
    steps: int
    history: list[dict[str, Any]]
    stopped_by: str | None
    resumed_from: int | None
    noise: NoiseScale | None
    seconds: float
    examples: int = 0
    checkpoints: Path | None = None
    log: Path | None = None

    @property
    def exit_code(self) -> int:
        """The exit code for a script: 0, or by shell convention 143 after SIGTERM and 130 after Ctrl-C."""
        return {None: 0, "SIGTERM": 143, "SIGINT": 130}[self.stopped_by]

    def __str__(self) -> str:
        first, *rest = self._summary().items()
        width = max(len(name) for name, _ in rest)
        return "\n".join([" ".join(first), *(f"  {name:<{width}}  {text}" for name, text in rest)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        (number, steps), *rest = self._summary().items()
        names, texts = zip(*rest, strict=True)
        columns = [Column("", names, is_left=True), Column("", texts, is_left=True)]
        return in_notebook(paragraph(f"{number} {steps}", "lead"), html_table(columns, [""] * len(rest)))

    def _summary(self) -> dict[str, str]:
        """The lines of the summary: what each is about, and a text."""
        is_short = self.seconds < 60
        time = f"{self.seconds:.1f} s" if is_short else str(datetime.timedelta(seconds=round(self.seconds)))
        since = "" if self.resumed_from is None else f", since it was resumed after step {self.resumed_from:,}"
        again = "" if self.checkpoints is None else ": run it again to resume"
        ended = f"stopped by {self.stopped_by}{again}" if self.stopped_by else "at the end of its steps or batches"
        lines = {
            f"{self.steps:,}": f"{'step' if self.steps == 1 else 'steps'} in {time}",
            "loss": self._loss(),
            "examples": f"{self.examples:,}{since}" if self.examples else "",
            "ended": ended,
            "checkpoints": str(self.checkpoints or ""),
            "log": str(self.log or ""),
            "state": f"{type(self.state).__name__}, in .state; the rows of the log are in .history",
        }
        return {name: text for name, text in lines.items() if text}

    def _loss(self) -> str:
        """The first and the last known loss of the run."""
        losses = [(row["step"], row["loss"]) for row in self.history if isinstance(row.get("loss"), (int, float))]
        if not losses:
            return ""
        (first, before), (last, after) = losses[0], losses[-1]
        start = "" if first == last else f"{before:.4g} at step {first:,}, "
        return f"{start}{after:.4g} at step {last:,}"


def fit(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batches: Iterable[Any],
    *,
    steps: int | None = None,
    epochs: int | None = None,
    evaluate: Callable[[Any], Any] | None = None,
    evaluate_every: int | None = None,
    log: Any = None,
    log_every: int = 1,
    checkpoints: Any = None,
    checkpoint_every: int | datetime.timedelta | None = None,
    keep: int = 3,
    resume: bool = True,
    progress: bool | str = True,
    prefetch: int = 2,
) -> Fitted:
    """Trains: calls `step` for each batch, shows progress, logs, saves checkpoints, and resumes from them.

    **The same bits.** A run that was stopped or killed and started again ends with the same parameters, bit for bit,
    as one that was not interrupted: the state, the order of the data, random keys and the strategy of the gradient are
    all restored.

    **Nothing lost.** SIGTERM and Ctrl-C stop the run after the current step, and the state is saved. If the process is
    killed, the steps since the last checkpoint are lost; an incomplete checkpoint is never loaded. If the data, an
    evaluation or the disk fails, the state after the last good step is saved, and is available as `error.state`. (If a
    step fails while it computes and donates its state, only the last checkpoint is left.)

    **In the background.** Batches are drawn and transferred while a step computes, checkpoints are written while later
    steps compute, and metrics are read two steps late, so the device does not wait.

    >>> import jax.numpy as jnp, numpy as np, optax, anybatch as ab
    >>> def loss(w, batch):
    ...     return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
    >>> data = {"x": np.eye(4, dtype=np.float32).repeat(8, 0), "y": np.ones(32, np.float32)}
    >>> step = ab.train_step(loss, optax.sgd(1.0))
    >>> run = ab.fit(step, step.init(jnp.zeros(4)), ab.Batches(data, 16, seed=0), epochs=20, progress=False)
    >>> run.steps, run.state.params.round(2).tolist()
    (40, [1.0, 1.0, 1.0, 1.0])

    Args:
      step: a function `step(state, batch)` that returns `(state, metrics)`: from `anybatch.train_step`, or your own.
      state: the initial state. If there is a checkpoint, its arrays replace those of this state.
      batches: `anybatch.Batches`, a grain dataset or loader, or any iterable of pytrees of arrays. To resume exactly,
        it must give the same batches each time it is made. For `anybatch.privacy.dp_sgd`, the batches of
        `privacy.poisson_batches(...).of(data)`.
      steps: the number of steps of the run, including those before a resumption. Batches that can be iterated over
        again are, until then.
      epochs: instead of `steps`, the number of passes over the batches. One by default.
      evaluate: a function of the state that returns a number, or a mapping of numbers, for the log.
      evaluate_every: the number of steps between evaluations. There is always one after the last step.
      log: a CSV file, e.g. "run.csv", with one row per step. A resumed run continues it.
      log_every: the number of steps between rows.
      checkpoints: a folder. If it holds checkpoints, the run is resumed from the newest.
      checkpoint_every: the number of steps, or the `datetime.timedelta`, between checkpoints. Ten minutes by default.
        There is always one at the end.
      keep: how many of the newest checkpoints to keep.
      resume: whether to resume from checkpoints. If False, the folder must have none.
      progress: True for a bar in a terminal and lines elsewhere, on the standard error; "bar", "lines" or False.
      prefetch: how many batches to transfer to the device in advance. With 0, each is drawn when it is needed.

    Returns:
      A `Fitted`: the state, the history, and how the run ended.

    Raises:
      InputError: for invalid arguments; no batches, batches of different structures or without examples; a checkpoint
        or a log of another run; a folder or file that cannot be written or that another run has open. Raised before any
        work is done where possible.
      CheckpointError: if the last state could not be saved (it is in `error.state`), or if the checkpoint to resume
        from is damaged or of another step than its name says.
    """
    if not callable(step):
        raise InputError(
            "A step must be a function of a state and a batch",
            given=f"step={step!r}",
            remedy="step = ab.train_step(loss, optimizer), then ab.fit(step, step.init(params), batches).",
        )
    if evaluate is not None and not callable(evaluate):
        raise InputError(
            "evaluate must be a function of the state",
            given=f"evaluate={evaluate!r}",
            remedy='For example evaluate=lambda state: {"accuracy": accuracy(state.params)}.',
        )
    whole_number("log_every", log_every, 1)
    _check_every("evaluate_every", evaluate_every, "evaluate", evaluate)
    _check_every("checkpoint_every", checkpoint_every, "checkpoints", checkpoints)
    steps, epochs = _check_length(steps, epochs)
    check_passes(batches, steps, epochs)
    whole_number("prefetch", prefetch, 0)
    if log is not None:
        check_log(log)
    refuse_deleted(named_arrays(state).values(), "ab.fit(step, state, batches)")
    display = display_for(progress, is_first=jax.process_index() == 0)
    with contextlib.ExitStack() as stack:
        folder = None if checkpoints is None else stack.enter_context(Checkpoints(checkpoints, keep=keep))
        total = _total_steps(batches, steps, epochs)
        run = Run(
            step,
            state,
            evaluate,
            evaluate_every,
            log_every,
            folder,
            BETWEEN_CHECKPOINTS if checkpoint_every is None else checkpoint_every,
            display,
            last_step=total,
            position=start_position(batches),
        )
        del state  # the run holds it, and replaces it
        stack.callback(run.close)
        run.start(log, resume=resume)
        if steps is not None and run.steps >= steps:
            display.say(f"There is nothing left to do: {run.steps} of {steps} steps were taken.")
            return _fitted(run, None)
        pairs = open_source(batches, epochs=epochs, position=run.position, notify=_skip_messages(display))
        remaining = None if steps is None else steps - run.steps
        # With several processes, transfers are collectives: a thread could run them in another order than the step's.
        ahead = prefetch if jax.process_count() == 1 else 0
        stop_signals = stack.enter_context(StopSignals(prints=progress is not False))
        pairs = itertools.islice(pairs, remaining)
        if jax.process_count() > 1:
            pairs = stop_signals.in_lockstep(pairs)
        prefetcher = stack.enter_context(Prefetcher(pairs, getattr(step, "put", to_device), ahead=ahead))
        stack.callback(display.close)
        display.begin(run.steps, total)
        stopped_by = run.take_steps(prefetcher, stop_signals)
        if stopped_by is None and steps is not None and run.steps < steps:
            warn(
                f"The batches ended after {run.steps} of {steps} steps. Pass batches that can be iterated over again "
                "(a list, anybatch.Batches, a dataset), or fewer steps."
            )
        return _fitted(run, stopped_by)


def _fitted(run: "Run", stopped_by: str | None) -> Fitted:
    return Fitted(
        run.state,
        run.steps,
        run.history,
        stopped_by,
        run.resumed_from,
        run.rows.noise,
        run.rows.seconds,
        examples=run.rows.throughput.examples,
        checkpoints=None if run.checkpoints is None else run.checkpoints.folder,
        log=None if run._log is None else run._log.path,
    )


def _check_every(name: str, given: Any, needs: str, needed: Any) -> None:
    """Checks a number of steps or a timedelta, and that the option that it needs is given, too."""
    if given is None:
        return
    if needed is None:
        raise InputError(
            f"{name} goes with {needs}", given=f"{name}={given!r} and {needs}=None", remedy=f"Pass {needs}, too."
        )
    if not (name == "checkpoint_every" and isinstance(given, datetime.timedelta) and given.total_seconds() >= 0):
        whole_number(name, given, 1, example="100")


def _check_length(steps: Any, epochs: Any) -> tuple[int | None, int | None]:
    if steps is not None and epochs is not None:
        raise InputError(
            "The length of a run is a number of steps or a number of epochs",
            given=f"steps={steps!r} and epochs={epochs!r}",
            remedy="Pass one of them.",
        )
    return None if steps is None else whole_number("steps", steps, 0), 1 if steps is None and epochs is None else epochs


def _total_steps(batches: Any, steps: int | None, epochs: int | None) -> int | None:
    """The number of steps of the run, if it can be known in advance."""
    if steps is not None or epochs is None:
        return steps
    try:
        return epochs * len(batches)
    except (TypeError, OverflowError):  # without a length, or endless
        return None


def _skip_messages(display: Display) -> Callable[[int, int], None]:
    """A function that shows, every few seconds, how many earlier batches were drawn again."""
    start, last = time.monotonic(), [0.0]

    def notify(done: int, total: int) -> None:
        now = time.monotonic()
        if now - max(start, last[0]) > BETWEEN_MESSAGES:
            last[0] = now
            display.say(f"Drawing the batches of earlier steps again: {done} of {total}")

    return notify


@dataclasses.dataclass(eq=False)
class Run:
    """One training run, new or resumed."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    evaluate: Callable[[Any], Any] | None
    evaluate_every: int | None
    log_every: int
    checkpoints: Checkpoints | None
    checkpoint_every: int | datetime.timedelta
    display: Display
    last_step: int | None  # of the run, if it is known
    position: SourcePosition | None
    steps: int = 0
    resumed_from: int | None = None
    rows: LogRows = dataclasses.field(default_factory=LogRows)
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # rows of the log
    _log: Log | None = None
    _earlier_logs: dict[str, Any] | None = None  # of a resumed run: path -> first row
    _keep_every: int = 1  # every how many rows the history keeps one
    _last_row: dict[str, Any] = dataclasses.field(default_factory=dict)
    _evaluated_step: int | None = None
    _logged_step: int | None = None
    _saved_step: int | None = None
    _saved_time: float = dataclasses.field(default_factory=time.monotonic)

    def start(self, log: Any, *, resume: bool) -> None:
        """Resumes from the newest checkpoint if there is one, else saves the first; opens the log."""
        newest = None if self.checkpoints is None else self.checkpoints.latest()
        given: dict[str, Any] = {}
        if newest is not None:
            given = self._resume(newest, resume=resume)
        if log is not None and jax.process_index() == 0:
            self._log = Log(log, after=self.resumed_from, check=self._check_log)
            if self.resumed_from is not None:
                self.history = read_log(log)
        if newest is None:
            # It shows at once whether the folder can hold the state, and fixes where the run started.
            self._save(is_last=True)
        if getattr(self.step, "donates", False):  # the first step would delete them; memory must not hold two states
            for array in given.values():
                if isinstance(array, jax.Array):
                    array.delete()

    def _resume(self, newest: int, *, resume: bool) -> dict[str, Any]:
        """Restores a checkpoint. Returns the arrays of the state that it replaces."""
        assert self.checkpoints is not None
        if not resume:
            raise InputError(
                "With resume=False the folder must have no checkpoints",
                given=f"checkpoints={str(self.checkpoints.folder)!r}, with one of step {newest}",
                remedy="Choose another folder, delete this one, or leave resume out to resume from it.",
            )
        self.steps, arrays, record = self.checkpoints.restore(named_arrays(self.state))
        given, self.state = named_arrays(self.state), with_arrays(self.state, arrays)
        self.resumed_from, self.position = self.steps, self._own_position(record["positions"])
        self._saved_step, self._saved_time = self.steps, time.monotonic()
        self.rows, self._earlier_logs = LogRows(record["rows"]), record.get("logs")
        if hasattr(self.step, "adopt"):
            self.step.adopt(record["decisions"])
        self.display.say(f"Resuming after step {self.steps}, from {self.checkpoints.folder}")
        then, now = self.checkpoints.versions(self.steps), self.checkpoints.versions()
        changed = [name for name in then if then[name] != now.get(name)]
        if changed:
            before, here = (", ".join(f"{name} {each.get(name)}" for name in changed) for each in (then, now))
            self.display.say(f"It was saved with {before}, and this is {here}: the bits of later steps may differ.")
        return given

    def _check_log(self, path: Path, rows: list[dict[str, Any]]) -> None:
        """Raises an InputError for a log of another run. A log is recognized by its first row, or its path without."""
        logs = self._earlier_logs
        if logs is None or not rows:  # anybatch 0.7.0 did not save them
            return
        if finite_numbers(rows[0]) in logs.values() or logs.get(str(path), rows[0]) is None:
            return
        assert self.checkpoints is not None
        had, another = next(iter(logs), None), str(path.with_stem(path.stem + "-2"))
        raise InputError(
            "The log of a resumed run must be its own",
            given=f"log={str(path)!r}, of another run, while the checkpoint of step {self.steps} is in "
            f"{self.checkpoints.folder}",
            remedy="Name "
            + (f"the log that the run had, {had!r}, or " if had else "")
            + f"a new one, e.g. log={another!r}.",
        )

    def _own_position(self, positions: list[SourcePosition | None]) -> SourcePosition | None:
        """This process's position in its data. With another number of processes, all positions must be equal."""
        if len(positions) == jax.process_count():
            return positions[jax.process_index()]
        if any(position != positions[0] for position in positions):
            raise InputError(
                "A run whose processes had different positions in their data must be resumed with as many processes",
                given=f"{jax.process_count()} processes, and {len(positions)} before",
                remedy=f"Start {len(positions)} processes, or start again with another folder for checkpoints.",
            )
        return positions[0]

    def take_steps(self, prefetcher: Prefetcher, stop_signals: StopSignals) -> str | None:
        """Takes a step for each batch, then logs and saves. Returns the signal that stopped it, or None."""
        try:
            stopped_by = self._take_steps(prefetcher, stop_signals)
            is_new = self.steps != (self.resumed_from or 0) and self._evaluated_step != self.steps
            self._flush_rows(evaluate=is_new and not stopped_by)
            self._save(is_last=True)
            stopped_by = stopped_by or stop_signals.received  # it may have come in the meantime
        except BaseException as error:
            self._rescue(error)
            raise
        if stopped_by is not None:
            self.display.say(self._stop_message(stopped_by))
        return stopped_by

    def _take_steps(self, prefetcher: Prefetcher, stop_signals: StopSignals) -> str | None:
        is_alone = jax.process_count() == 1
        while True:
            while is_alone and not prefetcher.ready(PATIENCE):
                if stop_signals.received:
                    return stop_signals.received
            if stop_signals.agreed:
                return stop_signals.agreed
            try:
                batch, position = next(prefetcher)
            except StopIteration:
                return None if is_alone else stop_signals.agreed
            self.state, metrics = self.step(self.state, batch)
            self.steps, self.position = self.steps + 1, position
            self.rows.add(self.steps, metrics, batch)
            del metrics, batch
            self._after_step()

    def _after_step(self) -> None:
        """Evaluates and saves if it is time, and logs the steps whose metrics are ready."""
        every = self.evaluate_every
        evaluates = self.steps == self.last_step or (every is not None and self.steps % every == 0)
        saves = self._is_checkpoint_due()
        if evaluates or saves:
            self._flush_rows(evaluate=evaluates)
            if saves:
                self._save(is_last=False)
            self.rows.throughput.restart()  # the pause must not count
        for row in self.rows.ready():
            self._write_row(row)

    def _is_checkpoint_due(self) -> bool:
        if self.checkpoints is None:
            return False
        if not isinstance(self.checkpoint_every, datetime.timedelta):
            return self.steps % self.checkpoint_every == 0
        is_due = time.monotonic() - self._saved_time >= self.checkpoint_every.total_seconds()
        if jax.process_count() == 1:
            return is_due
        # The clocks of the processes differ, so the first one decides.
        return self.steps % STEPS_BETWEEN_QUESTIONS == 0 and bool(multihost_utils.broadcast_one_to_all(is_due))

    def _save(self, *, is_last: bool) -> None:
        """Saves the state. A failure is a warning, and saving is tried again later; at the end it is an error."""
        if self.checkpoints is None:
            return
        try:
            if self._saved_step != self.steps:
                record = {
                    "positions": gather_json(self.position),
                    "rows": self.rows.saved,
                    "decisions": getattr(self.step, "decisions", {}),
                    "logs": self._logs(),
                }
                self.checkpoints.save(self.steps, named_arrays(self.state), record)
                self._saved_step, self._saved_time = self.steps, time.monotonic()
            if is_last:
                self.checkpoints.wait()
        except CheckpointError as error:
            self._saved_step, self._saved_time = None, time.monotonic()
            if is_last:
                raise
            warn(f"{error}\nThe run continues without it, and tries again at the next checkpoint.")

    def _logs(self) -> dict[str, Any]:
        """The first rows of this run's logs by path, by which `_check_log` recognizes them; None without rows."""
        logs = dict(self._earlier_logs or {})
        if self._log is not None:
            first = self._log.first_row
            logs[str(self._log.path)] = first and finite_numbers(first)
        return logs

    def _flush_rows(self, *, evaluate: bool) -> None:
        """Writes the rows of all steps, the last one with an evaluation if there is one."""
        rows = self.rows.flush()
        found: dict[str, Any] = {}
        try:
            if evaluate and self.evaluate is not None:
                found, self._evaluated_step = evaluation_columns(self.evaluate(self.state)), self.steps
        finally:  # a failed evaluation must not lose the rows
            if found and not rows:  # the row of this step is already written, and is replaced
                rows = [self._last_row or {"step": self.steps}]
                self.history = self.history[:-1] if self.history[-1:] == rows else self.history
            if found:
                rows[-1] = rows[-1] | found
            for row in rows:
                self._write_row(row, is_notable=bool(found) and row is rows[-1])

    def _write_row(self, row: dict[str, Any], *, is_notable: bool = False) -> None:
        self._last_row = row
        self.display.show(row, is_notable=is_notable)
        if not is_notable and row["step"] != 1 and row["step"] % self.log_every:
            return
        if self._log is not None:
            write = self._log.amend if row["step"] == self._logged_step else self._log.write
            write(row)
            self._logged_step = row["step"]
        if len(self.history) >= MOST_ROWS:
            self.history, self._keep_every = self.history[::2], 2 * self._keep_every
        if is_notable or row["step"] % self._keep_every == 0:
            self.history.append(row)

    def _rescue(self, error: BaseException) -> None:
        """Stores the state in the error that ends the run, and saves it if possible."""
        leaves = jax.tree.leaves(self.state)
        if any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, jax.Array)):
            saved = "" if self.checkpoints is None else f" The last checkpoint is in {self.checkpoints.folder}."
            error.add_note(f"The state after step {self.steps} was donated to the step that failed.{saved}")
            return
        error.state = self.state  # type: ignore[attr-defined]
        note = f"The state after step {self.steps} is in this error's attribute `state`"
        checkpoints = self.checkpoints
        is_to_be_saved = isinstance(error, Exception) and not isinstance(error, CheckpointError)
        if checkpoints is not None and is_to_be_saved and jax.process_count() == 1:
            try:
                self._flush_rows(evaluate=False)
                self._save(is_last=True)
                note += f", and saved in {checkpoints.folder}"
            except Exception as another:
                note += f". It could not be saved: {another}"
        error.add_note(note + ".")

    def _stop_message(self, stopped_by: str) -> str:
        if self.checkpoints is None:
            return (
                f"Stopped by {stopped_by} after step {self.steps}. The state was not saved: pass checkpoints= to be "
                "able to resume."
            )
        folder = self.checkpoints.folder
        return f"Stopped by {stopped_by} after step {self.steps}, saved in {folder}: run it again to resume."

    def close(self) -> None:
        """Closes the log, and drops the state."""
        if self._log is not None:
            self._log.close()
        self.state = None
