"""One training run: its state, and what it writes down of itself."""

import dataclasses
import datetime
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from anybatch.errors import InputError, user_stacklevel
from anybatch.training.checkpoints import CheckpointError, Checkpoints
from anybatch.training.feed import Feed
from anybatch.training.kinds import named_arrays, with_arrays
from anybatch.training.log import Log, finite, read_log
from anybatch.training.progress import Silent
from anybatch.training.rows import Rows, evaluation
from anybatch.training.sources import Position
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
        self.position: Position | None = None
        self.rows = Rows()
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
        self.rows, self._logs = Rows(record["rows"]), record.get("logs")
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

    def _own_position(self, positions: list[Position | None]) -> Position | None:
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

    def through(self, feed: Feed, stopper: Stopper) -> str | None:
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

    def _through(self, feed: Feed, stopper: Stopper) -> str | None:
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
