"""One training run: its state, and what it writes down of itself.

`fit`: the loop around a step, with everything that a run of some hours needs.
"""

import contextlib
import dataclasses
import datetime
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from anybatch.call.checks import must_be_path, whole_number
from anybatch.errors import InputError, user_stacklevel
from anybatch.gradient_noise.noise_scale import NoiseScale
from anybatch.training.arrays import refuse_deleted
from anybatch.training.checkpoints import CheckpointError, Checkpoints
from anybatch.training.log import Log, LogRows, check_log, evaluation, finite, read_log
from anybatch.training.prefetch import Prefetcher, to_device
from anybatch.training.progress import Silent, display
from anybatch.training.sources import SourcePosition, check_passes, open_source, start_position
from anybatch.training.state import named_arrays, with_arrays
from anybatch.training.stopping import Stopper, of_all_processes

# Rows that are kept in memory; of a longer run, every second, fourth, ...
MOST_ROWS = 100_000

# How long to wait for a batch before looking whether to stop, in seconds.
PATIENCE = 0.2

# After how many steps several processes ask the first whether it is time for a checkpoint.
STEPS_BETWEEN_QUESTIONS = 10

BETWEEN_CHECKPOINTS = datetime.timedelta(minutes=10)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What is done when: after so many steps, or after some time."""

    log_every: Any
    evaluate_every: Any
    checkpoint_every: Any


def every(name: str, given: Any, needs: tuple[str, Any] | None = None) -> Any:
    """Checks after how many steps something is done; for checkpoints, it may be a time.

    Raises:
      InputError: for anything else, or if there is nothing to do.
    """
    if given is None:
        return None
    if needs is not None and needs[1] is None:
        raise InputError(
            f"{name} goes with {needs[0]}",
            given=f"{name}={given!r} and {needs[0]}=None",
            remedy=f"Pass {needs[0]}, too.",
        )
    is_count = isinstance(given, int) and not isinstance(given, bool) and given > 0
    is_time = name == "checkpoint_every" and isinstance(given, datetime.timedelta) and given.total_seconds() >= 0
    if not is_count and not is_time:
        times = ", or a datetime.timedelta" if name == "checkpoint_every" else ""
        raise InputError(
            f"{name} must be a number of steps{times}", given=f"{name}={given!r}", remedy=f"For example {name}=100."
        )
    return given


class Run:
    """A run, from where it begins or goes on.

    Args:
      step: takes a step.
      state: to begin with.
      evaluate: a function of the state, or None.
      schedule: what is done when.
      checkpoints: where it is saved, or None.
      shown: what shows it.
      last_step: after which it will end, if that is known.
    """

    def __init__(
        self,
        step: Callable[[Any, Any], tuple[Any, Any]],
        state: Any,
        evaluate: Callable[[Any], Any] | None,
        schedule: Schedule,
        checkpoints: Checkpoints | None,
        shown: Silent,
        last_step: int | None = None,
    ) -> None:
        self.step, self.state, self.evaluate, self.schedule = step, state, evaluate, schedule
        self.checkpoints, self.shown, self.last_step = checkpoints, shown, last_step
        self.steps, self.resumed_from = 0, None  # type: int, int | None
        self.position: SourcePosition | None = None
        self.rows = LogRows()
        self.history: list[dict[str, Any]] = []  # rows of the log
        self._log: Log | None = None
        self._logs: dict[str, Any] | None = None  # those that the run had before: path -> first row
        self._keep_every = 1
        self._evaluated: int | None = None  # the step after which it was
        self._last_row: dict[str, Any] = {}
        self._written: int | None = None  # the step of the last row in the log
        self._saved: tuple[int | None, float] = (None, time.monotonic())

    def begin(self, log: Any, *, resume: bool) -> None:
        """Finds out where to go on, and opens the log there.

        Raises:
          InputError: if there are checkpoints and it is not to go on from them, or they are of something else.
          CheckpointError: if the folder cannot take the state.
        """
        newest = None if self.checkpoints is None else self.checkpoints.latest()
        given: dict[str, Any] = {}
        if newest is not None:
            given = self._resume(newest, resume=resume)
        if log is not None and jax.process_index() == 0:
            self._log = Log(log, after=self.resumed_from, check=self._check_log)
            if self.resumed_from is not None:
                self.history = read_log(log if isinstance(log, (str, os.PathLike)) else log[0])
        if self.checkpoints is not None and newest is None:
            # The first: it shows at once whether the folder can take it, and whoever comes next knows the beginning.
            self._save(is_last=True)
        if getattr(self.step, "donates", False):  # the first step would have used it up: it is not to stay beside it
            for array in given.values():
                if isinstance(array, jax.Array):
                    array.delete()

    def _resume(self, newest: int, *, resume: bool) -> dict[str, Any]:
        """Takes the state of a checkpoint. Returns the arrays of the one that was given."""
        assert self.checkpoints is not None
        if not resume:
            raise InputError(
                "With resume=False the folder must have no checkpoints",
                given=f"checkpoints={str(self.checkpoints.folder)!r}, with one of step {newest}",
                remedy="Choose another folder, delete this one, or leave resume out to go on from there.",
            )
        self.steps, arrays, record = self.checkpoints.restore(named_arrays(self.state))
        given, self.state = named_arrays(self.state), with_arrays(self.state, arrays)
        self.resumed_from, self.position = self.steps, self._own_position(record["positions"])
        self._saved = (self.steps, time.monotonic())
        self.rows, self._logs = LogRows(record["rows"]), record.get("logs")
        if hasattr(self.step, "adopt"):
            self.step.adopt(record["decisions"])
        self.shown.say(f"Going on after step {self.steps}, from {self.checkpoints.folder}")
        then, now = self.checkpoints.versions(self.steps), self.checkpoints.versions()
        others = [name for name in then if then[name] != now.get(name)]
        if others:
            before, here = (", ".join(f"{name} {each.get(name)}" for name in others) for each in (then, now))
            self.shown.say(f"It was saved with {before}, and this is {here}: it may go on with other bits.")
        return given

    def _check_log(self, path: Path, rows: list[dict[str, Any]]) -> None:
        """Raises an InputError for a log of another run. One that has no row yet is known by its path."""
        logs = self._logs
        if logs is None or not rows:  # 0.7.0 did not tell
            return
        if finite(rows[0]) in logs.values() or logs.get(str(path), rows[0]) is None:
            return
        assert self.checkpoints is not None
        had, another = next(iter(logs), None), str(path.with_stem(path.stem + "-2"))
        raise InputError(
            "The log of a run that goes on must be its own",
            given=f"log={str(path)!r}, of another run, while the checkpoint of step {self.steps} is in "
            f"{self.checkpoints.folder}",
            remedy="Name "
            + (f"the log that the run had, {had!r}, or " if had else "")
            + f"a new one, e.g. log={another!r}.",
        )

    def _own_position(self, positions: list[SourcePosition | None]) -> SourcePosition | None:
        """Where this process stood. In another number of processes than before, all must have stood alike."""
        if len(positions) == jax.process_count():
            return positions[jax.process_index()]
        if any(position != positions[0] for position in positions):
            raise InputError(
                "A run whose processes stood at different places of their data must go on in as many processes",
                given=f"{jax.process_count()} processes, and {len(positions)} before",
                remedy=f"Start {len(positions)} processes, or begin anew with another folder for checkpoints.",
            )
        return positions[0]

    def through(self, feed: Prefetcher, stopper: Stopper) -> str | None:
        """Takes a step for each batch. Returns the signal that ended it, if one did."""
        try:
            stopped_by = self._through(feed, stopper)
            is_new = self.steps != (self.resumed_from or 0) and self._evaluated != self.steps
            self._write_rows(evaluated=is_new and not stopped_by)
            if self.checkpoints is not None:
                self._save(is_last=True)
            stopped_by = stopped_by or stopper.noted  # it may have come while that was done
        except BaseException as error:
            self._rescue(error)
            raise
        if stopped_by is not None:
            self.shown.say(self._farewell(stopped_by))
        return stopped_by

    def _through(self, feed: Prefetcher, stopper: Stopper) -> str | None:
        alone = jax.process_count() == 1
        while True:
            while alone and not feed.ready(PATIENCE):
                if stopper.noted:
                    return stopper.noted
            if stopper.agreed:
                return stopper.agreed
            try:
                batch, position = next(feed)
            except StopIteration:
                return None if alone else stopper.agreed
            self.state, metrics = self.step(self.state, batch)
            self.steps, self.position = self.steps + 1, position
            self.rows.add(self.steps, metrics, batch)
            del metrics, batch
            self._look_around()

    def _look_around(self) -> None:
        """What there is to do after a step."""
        every = self.schedule.evaluate_every
        is_evaluated = self.steps == self.last_step or (every is not None and self.steps % every == 0)
        is_saved = self._is_to_be_saved()
        if is_evaluated or is_saved:
            self._write_rows(evaluated=is_evaluated)
            if is_saved:
                self._save(is_last=False)
            self.rows.go_on()
        for row in self.rows.ready():
            self._write(row)

    def _is_to_be_saved(self) -> bool:
        if self.checkpoints is None:
            return False
        when = BETWEEN_CHECKPOINTS if self.schedule.checkpoint_every is None else self.schedule.checkpoint_every
        if not isinstance(when, datetime.timedelta):
            return self.steps % when == 0
        due = time.monotonic() - self._saved[1] >= when.total_seconds()
        if jax.process_count() == 1:
            return due
        # The clocks of processes differ: the first decides, now and then.
        from jax.experimental import multihost_utils

        return self.steps % STEPS_BETWEEN_QUESTIONS == 0 and bool(multihost_utils.broadcast_one_to_all(due))

    def _save(self, *, is_last: bool) -> None:
        """Saves the state. What fails midway is said, and tried again the next time; at the end it is raised."""
        assert self.checkpoints is not None
        try:
            if self._saved[0] != self.steps:
                record = {
                    "positions": of_all_processes(self.position),
                    "rows": self.rows.kept,
                    "decisions": getattr(self.step, "decisions", {}),
                    "logs": (self._logs or {}) | (self._log.first_rows if self._log else {}),
                }
                self.checkpoints.save(self.steps, named_arrays(self.state), record)
                self._saved = (self.steps, time.monotonic())
            if is_last:
                self.checkpoints.wait()
        except CheckpointError as error:
            self._saved = (None, time.monotonic())
            if is_last:
                raise
            warnings.warn(
                f"{error}\nThe run goes on without it, and tries again at the next checkpoint.",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )

    def _write_rows(self, *, evaluated: bool) -> None:
        """All rows, up to the last step; with an evaluation after it, if it is time."""
        rows = self.rows.all_of_them()
        found: dict[str, Any] = {}
        try:
            if evaluated and self.evaluate is not None:
                found, self._evaluated = evaluation(self.evaluate(self.state)), self.steps
        finally:  # an evaluation that fails must not take the rows with it
            if found and not rows:  # the row is written: it is replaced by one with what was found
                rows = [self._last_row or {"step": self.steps}]
                self.history = self.history[:-1] if self.history[-1:] == rows else self.history
            if found:
                rows[-1] = rows[-1] | found
            for row in rows:
                self._write(row, is_notable=bool(found) and row is rows[-1])

    def _write(self, row: dict[str, Any], *, is_notable: bool = False) -> None:
        self._last_row = row
        self.shown.show(row, is_notable=is_notable)
        if not is_notable and row["step"] != 1 and row["step"] % self.schedule.log_every:
            return
        if self._log is not None:
            write = self._log.amend if row["step"] == self._written else self._log.write
            write(row)
            self._written = row["step"]
        if len(self.history) >= MOST_ROWS:
            self.history, self._keep_every = self.history[::2], 2 * self._keep_every
        if is_notable or row["step"] % self._keep_every == 0:
            self.history.append(row)

    def _rescue(self, error: BaseException) -> None:
        """Lets no state be lost to an error: whoever catches it has it, and so has the folder."""
        leaves = jax.tree.leaves(self.state)
        if any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, jax.Array)):
            saved = "" if self.checkpoints is None else f" What was saved last is in {self.checkpoints.folder}."
            error.add_note(f"The state after step {self.steps} was used up by what failed.{saved}")
            return
        error.state = self.state  # type: ignore[attr-defined]
        note = f"The state after step {self.steps} is in this error's attribute `state`"
        checkpoints = self.checkpoints
        is_to_be_saved = isinstance(error, Exception) and not isinstance(error, CheckpointError)
        if checkpoints is not None and is_to_be_saved and jax.process_count() == 1:
            try:
                self._write_rows(evaluated=False)
                self._save(is_last=True)
                note += f", and saved in {checkpoints.folder}"
            except Exception as another:
                note += f". It could not be saved: {another}"
        error.add_note(note + ".")

    def _farewell(self, stopped_by: str) -> str:
        if self.checkpoints is None:
            return (
                f"Stopped by {stopped_by} after step {self.steps}. It was not saved: pass checkpoints= to go on later."
            )
        folder = self.checkpoints.folder
        return f"Stopped by {stopped_by} after step {self.steps}, saved in {folder}: run it again to go on."

    def close(self) -> None:
        """Closes the log, and lets go of the state."""
        if self._log is not None:
            self._log.close()
        self.state = None


# How often to say that batches are gone through once more, in seconds.
SAY_EVERY = 5.0


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A training run, finished or stopped.

    Args:
      state: after the last step.
      steps: how many there were in all.
      history: the rows of the log, from the first step if there is a log to read them from.
      stopped_by: "SIGTERM" or "SIGINT" if a signal ended it; None if it came to its end.
      resumed_from: the step of the checkpoint it went on from; None if it began anew.
      noise: of the gradients, averaged over the last steps, if the step tells.
      seconds: that it took, with all its earlier parts.
    """

    state: Any
    steps: int
    history: list[dict[str, Any]] = dataclasses.field(repr=False)
    stopped_by: str | None
    resumed_from: int | None
    noise: NoiseScale | None
    seconds: float

    @property
    def exit_code(self) -> int:
        """For a script that ends with the run: 0; 143 after SIGTERM and 130 after Ctrl-C, as shells have it."""
        return {None: 0, "SIGTERM": 143, "SIGINT": 130}[self.stopped_by]


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
    """Trains: takes step after step, shows how it goes, saves, stops cleanly, and goes on where it stopped.

    **The same bits.** A run that was stopped or killed and started again ends with the same parameters, bit for bit,
    as one that was not: state, order of the data, random keys and the way the gradient is computed all go on.

    **Nothing lost.** SIGTERM and Ctrl-C end it after the step at hand, with the state saved. Killed outright, it loses
    the steps since its last checkpoint; one that was half written is never loaded. If the data, an evaluation or the
    disk fails, the state after the last good step is saved, and is `error.state`. (A step that fails while it computes
    has used up the state that it was given, if it donates: then the last checkpoint counts.)

    **In the background.** Batches are drawn and transferred while a step computes, checkpoints are written while the
    next ones do, and metrics are read two steps late, so that the device does not wait.

    >>> import jax.numpy as jnp, numpy as np, optax, anybatch as ab
    >>> def loss(w, batch):
    ...     return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
    >>> data = {"x": np.eye(4, dtype=np.float32).repeat(8, 0), "y": np.ones(32, np.float32)}
    >>> step = ab.train_step(loss, optax.sgd(1.0))
    >>> run = ab.fit(step, step.init(jnp.zeros(4)), ab.Batches(data, 16, seed=0), epochs=20, progress=False)
    >>> run.steps, run.state.params.round(2).tolist()
    (40, [1.0, 1.0, 1.0, 1.0])

    Args:
      step: `step(state, batch)` returns `(state, metrics)`: that of `anybatch.train_step`, or your own.
      state: to begin with. Where a checkpoint is found, that is taken instead; this one tells how it must look.
      batches: `anybatch.Batches`, a dataset or loader of grain, or any iterable of trees of arrays. It must give the
        same batches each time that it is made, or nobody can go on exactly. For `anybatch.privacy.dp_sgd`, the batches
        of `privacy.poisson_batches(...).of(data)`.
      steps: after how many to end, those before a resumption too. What can be iterated over again is, until then.
      epochs: or after how many passes over the batches. By default one.
      evaluate: a function of the state that returns a number, or a mapping of them, for the log.
      evaluate_every: after how many steps it is called. It is called after the last one, too.
      log: a file, "run.csv" or "run.jsonl", or several; each row tells of a step. A resumed run continues it.
      log_every: after how many steps there is a row.
      checkpoints: a folder. If it has checkpoints, the run goes on from the newest.
      checkpoint_every: after how many steps, or after what time, to save. By default every ten minutes. There is one
        at the end, too.
      keep: how many of the newest checkpoints to keep.
      resume: whether to go on from checkpoints. If not, there must be none.
      progress: True for a bar in a terminal and lines elsewhere, on the standard error; "bar", "lines" or False.
      prefetch: how many batches to have on the device in advance; 0 draws each when it is needed.

    Returns:
      The state, the history, and how it ended: a `Fitted`.

    Raises:
      InputError: for arguments that cannot be worked with, no batches, batches that change their form or have no
        examples, a checkpoint or a log of something else, a folder or file that cannot be written or that another run
        has open. Before any work is done, where it can be known.
      CheckpointError: if the last state could not be saved; `error.state` has it. If the checkpoint to go on from is
        damaged, or of another step than its name says.
    """
    _check(step, evaluate)
    schedule = Schedule(
        log_every=every("log_every", log_every),
        evaluate_every=every("evaluate_every", evaluate_every, needs=("evaluate", evaluate)),
        checkpoint_every=every("checkpoint_every", checkpoint_every, needs=("checkpoints", checkpoints)),
    )
    steps, epochs = _length(steps, epochs)
    check_passes(batches, steps, epochs)
    whole_number("prefetch", prefetch, 0)
    if checkpoints is not None:
        must_be_path("checkpoints", checkpoints, "checkpoints")
    if log is not None:
        check_log(log)
    refuse_deleted(named_arrays(state).values(), "ab.fit(step, state, batches)")
    shown = display(progress, is_first=jax.process_index() == 0)
    with contextlib.ExitStack() as stack:
        folder = None if checkpoints is None else stack.enter_context(Checkpoints(checkpoints, keep=keep))
        total = _total(batches, steps, epochs)
        run = Run(step, state, evaluate, schedule, folder, shown, last_step=total)
        run.position = start_position(batches)
        del state  # the run has it, and replaces it
        stack.callback(run.close)
        run.begin(log, resume=resume)
        if steps is not None and run.steps >= steps:
            shown.say(f"There is nothing left to do: {run.steps} of {steps} steps were taken.")
            return _fitted(run, None)
        pulls = open_source(batches, epochs=epochs, position=run.position, notify=_skipping(shown))
        remaining = None if steps is None else steps - run.steps
        # Transfers of several processes are collective: in a thread they might meet those of a step in another order.
        ahead = prefetch if jax.process_count() == 1 else 0
        stopper = stack.enter_context(Stopper(says_so=progress is not False))
        pulls = itertools.islice(pulls, remaining)
        if jax.process_count() > 1:
            pulls = stopper.together(pulls)
        feed = stack.enter_context(Prefetcher(pulls, getattr(step, "put", to_device), ahead=ahead))
        stack.enter_context(shown)
        shown.begin(run.steps, total)
        stopped_by = run.through(feed, stopper)
        if stopped_by is None and steps is not None and run.steps < steps:
            warnings.warn(
                f"The batches ended after {run.steps} of {steps} steps. Pass something that can be iterated over again "
                "(a list, anybatch.Batches, a dataset), or fewer steps.",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )
        return _fitted(run, stopped_by)


def _fitted(run: Run, stopped_by: str | None) -> Fitted:
    return Fitted(run.state, run.steps, run.history, stopped_by, run.resumed_from, run.rows.noise, run.rows.seconds)


def _check(step: Any, evaluate: Any) -> None:
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


def _length(steps: Any, epochs: Any) -> tuple[int | None, int | None]:
    if steps is not None and epochs is not None:
        raise InputError(
            "A run ends after so many steps or after so many epochs",
            given=f"steps={steps!r} and epochs={epochs!r}",
            remedy="Pass one of them.",
        )
    return None if steps is None else whole_number("steps", steps, 0), 1 if steps is None and epochs is None else epochs


def _total(batches: Any, steps: int | None, epochs: int | None) -> int | None:
    """How many steps there will be, if that can be known."""
    if steps is not None or epochs is None:
        return steps
    try:
        return epochs * len(batches)
    except (TypeError, OverflowError):  # it does not tell, or has no end
        return None


def _skipping(shown: Silent) -> Callable[[int, int], None]:
    """Says that batches are drawn once more, if that takes a while."""
    begun, told = time.monotonic(), [0.0]

    def notify(done: int, total: int) -> None:
        now = time.monotonic()
        if now - max(begun, told[0]) > SAY_EVERY:
            told[0] = now
            shown.say(f"Going through the batches of earlier steps: {done} of {total}")

    return notify
